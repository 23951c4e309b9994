"""long-problem: 94,698 tokens through a pool of 63 pages, the fact at 45 % depth; and, with --grid, a map of depths."""

from __future__ import annotations

from engine.faults import shuffle_checkpoints
from gates.arms import ArmSpec, Settings, blinding, excluding, instrument, plain
from gates.context import Context
from gates.frozen import Arms, Frozen, warnings_checked
from gates.multi_needle import POOL, TASKS
from gates.verdict import Report

TOKENS = 94_698
QUICK_TOKENS = 24_000
DEPTH = 0.45
SPREAD = 0.01
"""Between the facts of one document: 947 tokens, so that no two share a page or a neighbour."""

GRID_DEPTHS = (0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)
GRID_SHARES = (1 / 8, 1 / 4, 1 / 2, 1)
GRID = "grid"


def specs(prefill: str, excluded: Settings) -> list[ArmSpec]:
    return [
        ArmSpec("dense", "dense", plain(prefill, decode="exact")),
        ArmSpec("default", "positive", plain(prefill)),
        ArmSpec("recall off", "control", plain(prefill, decode="window"), twin="default", warns=True),
        ArmSpec("newest pages", "control", plain(prefill, control="newest"), twin="default", quick=False),
        ArmSpec("random pages", "control", plain(prefill, control="random"), twin="default", quick=False),
        ArmSpec("fact excluded", "control", excluded, twin="default"),
        # Half: 31 pages in each layer and step show a fact by luck, the more so the shorter the document.
        ArmSpec("page tables shuffled", "control", plain(prefill), twin="default", where="shuffled", red=0.5),
    ]


def run(context: Context, tokens: int | None = None, trials: int = 3) -> Report:
    """The gate of spec/gates.md. `--length` takes another length, `--grid` adds the map."""
    options = context.options
    report = Report("long-problem", environment=context.environment(), blinding_switches=blinding(context.config))
    wanted = tokens or options.tokens(TOKENS, QUICK_TOKENS)
    tokens = context.fitted(wanted, report)
    pool = context.outgrown(POOL, tokens)
    tasks = ("keyed", "disjoint") if options.quick else TASKS
    depths = [DEPTH + SPREAD * (index - trials + 0.5) for index in range(2 * trials)]
    work = [(seed, task, tokens, depths) for seed in options.seed_numbers for task in tasks]
    if options.grid:
        lengths = [round(tokens * share) for share in GRID_SHARES]
        work += [(seed, GRID, length, GRID_DEPTHS) for seed in options.seed_numbers for length in lengths]
    arms: Arms = {}
    for number, (seed, task, length, places) in enumerate(work):
        _document(context, (seed, task, length, places), arms, _part(context, number, len(work)))
    report.arms = list(arms.values())
    report.checks = [*instrument(report.arms), *warnings_checked(arms)]
    report.notes.append(f"the prompt is {tokens / pool:.1f} times the pool")
    return report.judge()


def _part(context: Context, number: int, parts: int):
    return lambda what, share: context.say(what, (number + share) / parts)


def _document(context: Context, work: tuple, arms: Arms, say) -> None:
    seed, task, length, depths = work
    document = context.document(task, length, seed, depths=depths)
    say(f"{task}: {document.tokens:,} tokens, prefill {context.prefill}", 0.0)
    pool = context.pool(POOL, document.tokens)
    with Frozen(context, document, {"pool": pool, "shuffled": pool}) as frozen:
        chosen = specs(context.prefill, excluding(frozen.main, document, context.prefill))
        if task == GRID:
            chosen = [spec for spec in chosen if spec.name in ("dense", "default", "recall off")]
        elif context.options.quick:
            chosen = [spec for spec in chosen if spec.quick]
        if any(spec.where == "shuffled" for spec in chosen):
            shuffle_checkpoints(frozen.engine("shuffled"), seed)
        frozen.run(chosen, arms, say)
