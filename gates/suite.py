"""suite: what recall keeps of a model's own ability, task by task: dense, exact, recall and controls side by side.

A measurement first. A task counts where the model, seeing everything, answers at least half, and where the control
without recall does clearly worse; then recall must not be clearly worse than dense (exact sign tests at 5 %).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat

from engine.config import PAGE, EngineConfig
from engine.errors import ConfigError
from gates.arms import ANSWER, ArmSpec, Exam, blinding, plain
from gates.context import ROOM, Context
from gates.frozen import Arms, Frozen
from gates.haystack import TASKS
from gates.options import GateOptions
from gates.ruler import ASKED, PAPERS, papers
from gates.verdict import Check, Report

TOKENS, QUICK_TOKENS = 16_384, 6_000
SHARE = 16  # one page in so many is resident
WEAK = 0.5
LEVEL = 0.05
LEAST_POOL = 12 * PAGE
FEWEST = 8
"""Pages: sink 1, open 1, chunk 1, recent 1, working 4 come first; of 7 nothing was ever selected."""
ALL = (*TASKS, *PAPERS)


def run(context: Context, tokens: int | None = None) -> Report:
    """Every task, or those of `--tasks`; `--length`, `--budget`, `--seeds` as given."""
    options = context.options
    report = Report("suite", environment=context.environment(), blinding_switches=blinding(context.config))
    wanted = tokens or options.tokens(TOKENS, QUICK_TOKENS)
    tokens = context.fitted(wanted, report)
    pool = options.budget or context.config.kv_capacity or max(LEAST_POOL, tokens // SHARE // PAGE * PAGE)
    if pool < FEWEST * PAGE:
        few = f"a pool of {pool // PAGE} pages leaves none to select beside sink, open, chunk, recent and working ones"
        raise ConfigError(few, f"--budget {FEWEST * PAGE} or more")
    if tokens < 2 * pool:
        few = f"a prompt of {tokens:,} tokens is less than two pools of {pool:,}: hardly a page would be hidden"
        raise ConfigError(few, f"--length {2 * pool} or more, or a smaller --budget")
    report.notes.append(
        f"{tokens:,} tokens, {tokens // PAGE} pages, {pool // PAGE} resident (1 in {tokens / pool:.1f})"
    )
    tasks = chosen_tasks(options)
    arms: Arms = {}
    for number, task in enumerate(tasks):

        def say(what: str, share: float, number: int = number) -> None:
            context.say(what, (number + share) / len(tasks))

        for exam, short in _exams(context, task, tokens):
            _run(context, exam, short, pool, arms, say)
    report.arms = list(arms.values())
    counted = sum(_count(arms, task, report) for task in tasks)
    report.judge()
    if not counted and report.verdict == "INCONCLUSIVE":
        report.verdict, report.reasons = "WEAK MODEL", ["no task counts: see the notes"]
    return report


def chosen_tasks(options: GateOptions) -> tuple[str, ...]:
    """Those of `--tasks`, or every one; ConfigError for a name that is none."""
    tasks = tuple(dict.fromkeys(options.tasks or ALL))  # asked twice, an answer would count twice
    for task in tasks:
        if task not in ALL:
            raise ConfigError(f"there is no task '{task}'", f"some of {', '.join(ALL)}")
    return tasks


def _shares(config: EngineConfig, pool: int) -> dict[str, int]:
    """Sink and chunk that leave such a pool room to select."""
    pages = pool // PAGE
    chunk = min(config.prefill_chunk, max(1, pages // 6) * PAGE)
    return {"prefill_chunk": chunk, "sink": min(config.sink, max(1, pages // 10) * PAGE)}


def _exams(context: Context, task: str, tokens: int) -> Iterator[tuple[Exam, Exam | None]]:
    """The exams of a task, and with compact positions the same shorter, as the model's ceiling."""
    trained = context.model.config.trained_context
    short = trained // 2 if context.config.positions == "compact" else None

    def make(size: int) -> Iterator[Exam]:
        if task in TASKS:
            return (context.document(task, size, seed, asked=ASKED) for seed in context.options.seed_numbers)
        more = {"tokens": size, "count": context.counter, "filler": context.filler, "asked": ASKED}
        return papers(task, context.options.seed_numbers, **more)

    try:
        yield from zip(make(tokens), make(short) if short else repeat(None), strict=False)
    except ValueError as error:
        raise ConfigError(f"{task}: {error}", "--length with more tokens, or another --haystack") from None


def _run(context: Context, exam: Exam, short: Exam | None, pool: int, arms: Arms, say) -> None:
    """One exam, prefilled once: where everything fits if that is exact, else (and packed) in the small pool itself."""
    answer = PAPERS[exam.task][1] if exam.task in PAPERS else 2 * ANSWER  # a real model says a sentence
    asked, shares = context.config.prefill, _shares(context.config, pool)
    prefill = "recall" if short else "exact" if asked == "auto" else asked
    packed = replace(context, config=replace(context.config, prefill=prefill, **shares))
    dense = ArmSpec("dense", "shown", plain("exact" if short else prefill, decode="exact"), where="whole")
    specs = [
        ArmSpec("exact", "shown", plain(prefill, decode="exact"), where="small"),
        ArmSpec("recall", "shown", plain(prefill), where="small", explains=True),
        ArmSpec("recall off", "shown", plain(prefill, decode="window"), where="small"),
        ArmSpec("newest pages", "shown", plain(prefill, control="newest"), where="small", quick=False),
        ArmSpec("random pages", "shown", plain(prefill, control="random"), where="small", quick=False),
    ]
    chosen = [spec for spec in specs if spec.quick or not context.options.quick]
    say(f"{exam.task}: {exam.tokens:,} tokens, prefill {prefill}", 0.0)
    if short is None:
        exact = replace(context, config=replace(context.config, prefill=prefill))
        pools = {"whole": exam.tokens + ROOM, "small": pool}
        if prefill == "exact":  # the same pages from either, and sooner where nothing streams
            frozen = Frozen(exact, exam, pools, **shares)
        else:
            frozen = Frozen(packed, exam, dict(reversed(pools.items())))
        with frozen:
            frozen.run([dense, *chosen], arms, say, answer)
        return
    below = replace(context, config=replace(context.config, positions="absolute", prefill="exact"))
    with Frozen(below, short, {"whole": short.tokens + ROOM}) as frozen:
        frozen.run([dense], arms, say, answer)
    with Frozen(packed, exam, {"small": pool}) as frozen:
        frozen.run(chosen[1:], arms, say, answer)  # exact would see more positions than the model knows


def _count(arms: Arms, task: str, report: Report) -> bool:
    """Whether the task says something, and then what."""
    dense, recall, off = (arms[task, name] for name in ("dense", "recall", "recall off"))
    if dense.hits < WEAK * dense.trials:
        dense.note = "weak: not counted"
        report.notes.append(f"{task}: not counted, the model finds {dense.hits} of {dense.trials} seeing everything")
        return False
    if off.worse(dense) > LEVEL:
        dense.note = "control green: not counted"
        report.notes.append(f"{task}: not counted, without recall {off.hits} of {off.trials} are right as well")
        return False
    lost, won = recall.against(dense)
    detail = (
        f"{recall.hits} of {recall.trials}, dense {dense.hits}; lost {lost}, won {won}, p = {recall.worse(dense):.3f}"
    )
    seen = f"{recall.hidden_pages} pages hidden, {recall.pages_selected:,} selected"
    report.checks += [
        Check(f"instrument, {recall.label}", recall.hidden_pages > 0 < recall.pages_selected, seen),
        Check(f"{task}: recall is not clearly worse than dense", recall.worse(dense) > LEVEL, detail),
    ]
    return True
