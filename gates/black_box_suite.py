"""suite from outside: what a server keeps of its model's ability as the prompt grows, task by task.

The ceiling is our own server's exact attention, or of another server, whose arms can't be chosen, the same task in a
short document. The control asks the same questions over another document of that length: whoever answers those
remembers what this conversation doesn't hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.errors import ConfigError
from gates.arms import Exam
from gates.haystack import TASKS, Counter, build
from gates.options import GateOptions
from gates.outside import ANSWER, EXACT, RECALL_OFF, Ask, Say, fitted, prompt_length, put
from gates.remote import Server
from gates.ruler import ASKED, PAPERS, papers
from gates.suite import LEVEL, QUICK_TOKENS, TOKENS, WEAK, chosen_tasks
from gates.verdict import Arm, Check, Report

SHORT = (600, 1_200, 2_400)  # tokens of the ceiling's document: the first that a task's facts fit
OTHER = 10_000  # seeds of what belongs to no question
BLIND = 0.25

Arms = dict[tuple[str, str], Arm]


def run(
    report: Report, server: Server, count: Counter, ours: bool, options: GateOptions, say: Say, filler: Any
) -> Report:
    """Every task, or those of `--tasks`."""
    tasks = chosen_tasks(options)
    tokens = fitted(server, options.tokens(TOKENS, QUICK_TOKENS), report)
    report.not_run.append("newest and random pages: they need the inside of the engine")
    if not ours:
        report.not_run.append("exact, recall and recall off: this server's attention can't be chosen from outside")
        report.notes.append("a loss from short to long may be the model's own: no black box shows it seeing everything")
    arms: Arms = {}
    for number, task in enumerate(tasks):
        try:
            exams = _exams(task, tokens, count, options.seed_numbers, filler)
            others = _exams(task, tokens, count, [OTHER + seed for seed in options.seed_numbers], filler)
            shorts = [] if ours else _short(task, tokens, count, options.seed_numbers, filler)
        except ValueError as error:
            raise ConfigError(f"{task}: {error}", "--length with more tokens, or another --haystack") from None
        work = [(exam, ask) for pair in zip(exams, others, strict=True) for exam, ask in _asks(*pair, ours)]
        work += [(short, Ask("short document", "shown", short.messages)) for short in shorts]
        for step, (exam, ask) in enumerate(work):
            say(f"{task}: {ask.name}", (number + step / len(work)) / len(tasks))
            answer = max(ANSWER, PAPERS[task][1] if task in PAPERS else 0)
            put(server, exam, ask, arms.setdefault((task, ask.name), ask.new_arm(task)), answer)
    report.arms = list(arms.values())
    long = [arm for arm in report.arms if arm.name == "long document"]
    report.checks = [prompt_length([arm for arm in long if arm.task in TASKS], tokens)]
    counted = sum(_count(arms, task, "exact" if ours else "short document", report) for task in tasks)
    report.judge()
    if report.verdict == "PASS" and (faults := [f"{arm.label}: {arm.note}" for arm in report.arms if arm.note]):
        report.verdict, report.reasons = "INCONCLUSIVE", faults
    elif report.verdict == "PASS" and not counted:
        report.verdict, report.reasons = "WEAK MODEL", ["no task counts: see the notes"]
    return report


def _exams(task: str, tokens: int, count: Counter, seeds: Sequence[int], filler: Any) -> list[Exam]:
    """The exams of a task, of one turn each; ValueError where the facts don't fit."""
    if task in PAPERS:
        return list(papers(task, seeds, tokens=tokens, count=count, filler=filler, asked=ASKED))
    return [build(task, tokens, count, seed, filler=filler, asked=ASKED) for seed in seeds]


def _short(task: str, tokens: int, count: Counter, seeds: Sequence[int], filler: Any) -> list[Exam]:
    for size in SHORT:
        try:
            return _exams(task, min(size, tokens), count, seeds, filler)
        except ValueError:
            if size == SHORT[-1] or size >= tokens:
                raise
    return []


def _asks(exam: Exam, other: Exam, ours: bool) -> list[tuple[Exam, Ask]]:
    asks = [
        Ask("long document", "shown", exam.messages),
        Ask("another document", "shown", other.messages),
    ]
    if ours:
        asks[:0] = [Ask("exact", "shown", exam.messages, EXACT)]
        asks.append(Ask("recall off", "shown", exam.messages, RECALL_OFF))
    return [(exam, ask) for ask in asks]


def _count(arms: Arms, task: str, ceiling: str, report: Report) -> bool:
    """Whether the task says something, and then what."""
    top, long, other = (arms[task, name] for name in (ceiling, "long document", "another document"))
    control = f"{other.hits} of {other.trials} right over another document, {long.hits} over their own"
    report.checks.append(
        Check(f"control: {task}, another document", other.hits <= BLIND * other.trials, control, control=True)
    )
    why = ""
    if faults := [arm.note for arm in (top, long, other) if arm.note]:
        why = faults[0]
    elif top.hits < WEAK * top.trials:
        why = f"the model finds {top.hits} of {top.trials}: {ceiling}"
    elif other.worse(top) > LEVEL:
        why = f"{top.trials} trials are too few to tell {top.hits} hits from {other.hits}"
    elif (off := arms.get((task, "recall off"))) is not None and off.worse(top) > LEVEL:
        why = f"without recall {off.hits} of {off.trials} are right as well"
    if why:
        report.notes.append(f"{task}: not counted, {why}")
        return False
    detail = f"{long.hits} of {long.trials}, {ceiling} {top.hits} of {top.trials}; p = {long.worse(top):.3f}"
    name = f"{task}: the long document is not clearly worse than {ceiling}"
    report.checks.append(Check(name, long.worse(top) > LEVEL, detail))
    return True
