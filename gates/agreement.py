"""agreement: exact attention and recall say the same, and how much of the exact attention recall's window covers."""

from __future__ import annotations

from engine.config import RecallParams
from engine.examine import coverage
from gates.arms import ArmSpec, blinding, instrument, plain
from gates.context import Context
from gates.frozen import Arms, Frozen, warnings_checked
from gates.haystack import TASKS
from gates.multi_needle import POOL
from gates.verdict import Arm, Check, Report

TOKENS, QUICK_TOKENS = 24_000, 12_000


def run(context: Context, tokens: int | None = None) -> Report:
    """The gate of spec/gates.md: every kind of fact, word for word."""
    options = context.options
    report = Report("agreement", environment=context.environment(), blinding_switches=blinding(context.config))
    wanted = tokens or options.tokens(TOKENS, QUICK_TOKENS)
    tokens = context.fitted(wanted, report)
    context.outgrown(POOL, tokens)
    asked = 4 if options.quick else 12
    specs = [
        ArmSpec("exact", "dense", plain(context.prefill, decode="exact")),
        ArmSpec("recall", "positive", plain(context.prefill)),
        ArmSpec("recall off", "control", plain(context.prefill, decode="window"), twin="recall", warns=True),
    ]
    work = [(seed, task) for seed in options.seed_numbers for task in TASKS]
    arms: Arms = {}
    covered: list[list[float]] = []
    for number, (seed, task) in enumerate(work):

        def say(what: str, share: float, number: int = number) -> None:
            context.say(what, (number + share) / len(work))

        document = context.document(task, tokens, seed, asked=asked)
        say(f"{task}: {document.tokens:,} tokens, prefill {context.prefill}", 0.0)
        with Frozen(context, document, {"pool": context.pool(POOL, document.tokens)}) as frozen:
            frozen.run(specs, arms, say)
            messages = document.messages(document.asked[0])
            covered.append(coverage(frozen.main, messages, RecallParams(prefill=context.prefill)))
    report.arms = list(arms.values())
    report.checks = [*_alike(arms), *instrument(report.arms), *warnings_checked(arms)]
    report.notes += _layers([shares for shares in covered if shares])
    return report.judge()


def _alike(arms: Arms) -> list[Check]:
    """Word for word: recall as exact; without recall not (else nothing had to be recalled)."""

    def same(one: Arm, other: Arm) -> int:
        return sum(a.said == b.said for a, b in zip(one.outcomes, other.outcomes, strict=True))

    checks = []
    for task in dict.fromkeys(task for task, _ in arms):
        exact, recall, off = (arms[task, name] for name in ("exact", "recall", "recall off"))
        alike, without = same(exact, recall), same(exact, off)
        checks += [
            Check(
                f"{task}: recall answers word for word as exact", alike == exact.trials, f"{alike} of {exact.trials}"
            ),
            Check(
                f"control: {task} without recall", without <= exact.trials // 4, f"{without} of {exact.trials}", True
            ),
        ]
    return checks


def _layers(covered: list[list[float]]) -> list[str]:
    """The exact step's attention that lies inside recall's window, layer by layer, the least over the tasks."""
    if not covered:
        return ["attention covered by the window: not measured by this backend"]
    least = [min(column) for column in zip(*covered, strict=True)]
    return ["attention covered by the window, least over tasks, by layer: " + " ".join(f"{s:.1%}" for s in least)]
