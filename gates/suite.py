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
from gates.interval import sign_test
from gates.ruler import ASKED, PAPERS, papers
from gates.verdict import Arm, Check, Report

TOKENS, QUICK_TOKENS = 16_384, 6_000
SHARE = 16  # one page in so many is resident
WEAK = 0.5
LEVEL = 0.05
LEAST_POOL = 12 * PAGE
ALL = (*TASKS, *PAPERS)


def run(context: Context, tokens: int | None = None) -> Report:
    """Every task, or those of `--tasks`; `--length`, `--budget`, `--seeds` as given."""
    options = context.options
    report = Report("suite", environment=context.environment(), blinding_switches=blinding(context.config))
    wanted = tokens or options.length or (QUICK_TOKENS if options.quick else TOKENS)
    tokens = context.fitted(wanted, report)
    pool = options.budget or max(LEAST_POOL, tokens // SHARE // PAGE * PAGE)
    report.notes.append(
        f"{tokens:,} tokens, {tokens // PAGE} pages, {pool // PAGE} resident (1 in {tokens / pool:.1f})"
    )
    tasks = tuple(options.tasks or ALL)
    unknown = [task for task in tasks if task not in ALL]
    if unknown:
        raise ConfigError(f"there is no task '{unknown[0]}'", f"some of {', '.join(ALL)}")
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
    """One exam: prefilled where everything fits, adopted by the small pool; with compact positions in that itself."""
    answer = PAPERS[exam.task][1] if exam.task in PAPERS else 2 * ANSWER  # a real model says a sentence
    prefill = "recall" if short else "exact"
    dense = ArmSpec("dense", "shown", plain("exact", decode="exact"))
    specs = [
        ArmSpec("exact", "shown", plain(prefill, decode="exact"), where="small"),
        ArmSpec("recall", "shown", plain(prefill), where="small"),
        ArmSpec("recall off", "shown", plain(prefill, decode="window"), where="small"),
        ArmSpec("newest pages", "shown", plain(prefill, control="newest"), where="small", quick=False),
        ArmSpec("random pages", "shown", plain(prefill, control="random"), where="small", quick=False),
    ]
    chosen = [spec for spec in specs if spec.quick or not context.options.quick]
    small = _shares(context.config, pool)
    say(f"{exam.task}: {exam.tokens:,} tokens, prefill {prefill}", 0.0)
    if short is None:
        context = replace(context, config=replace(context.config, prefill="exact"))
        with Frozen(context, exam, {"pool": exam.tokens + ROOM, "small": pool}, **small) as frozen:
            frozen.run([dense, *chosen], arms, say, answer)
        return
    below = replace(context, config=replace(context.config, positions="absolute", prefill="exact"))
    with Frozen(below, short, {"pool": short.tokens + ROOM}) as frozen:
        frozen.run([dense], arms, say, answer)
    packed = replace(context, config=replace(context.config, prefill="recall", **small))
    with Frozen(packed, exam, {"pool": pool}) as frozen:
        frozen.run([replace(spec, where="pool") for spec in chosen[1:]], arms, say, answer)


def _count(arms: Arms, task: str, report: Report) -> bool:
    """Whether the task says something, and then what."""
    dense, recall, off = (arms[task, name] for name in ("dense", "recall", "recall off"))
    if dense.hits < WEAK * dense.trials:
        dense.note = "weak: not counted"
        report.notes.append(f"{task}: not counted, the model finds {dense.hits} of {dense.trials} seeing everything")
        return False
    if _p(off, dense) > LEVEL:
        dense.note = "control green: not counted"
        report.notes.append(f"{task}: not counted, without recall {off.hits} of {off.trials} are right as well")
        return False
    lost, won = recall.against(dense)
    detail = (
        f"{recall.hits} of {recall.trials}, dense {dense.hits}; lost {lost}, won {won}, p = {_p(recall, dense):.3f}"
    )
    report.checks.append(Check(f"{task}: recall is not clearly worse than dense", _p(recall, dense) > LEVEL, detail))
    return True


def _p(arm: Arm, dense: Arm) -> float:
    return sign_test(*arm.against(dense))
