"""Gates from outside: the arms that any OpenAI-compatible server can be asked for, ours or another's.

Here: the needles. The ceiling is the same fact in a short document; the control is the long document without the
facts. What needs the inside of an engine is listed as not run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError
from gates import black_box_agreement, black_box_suite, black_box_turns
from gates.haystack import GATE_TOKENS, Counter, Document, Fact, Message, build
from gates.long_problem import DEPTH, SPREAD
from gates.long_problem import TOKENS as LONG_TOKENS
from gates.multi_needle import TASKS
from gates.options import GateOptions
from gates.outside import (
    RECALL_OFF,
    SHORT,
    Ask,
    Said,
    Say,
    fitted,
    learn_counting,
    new_report,
    over,
    prompt_length,
    put,
    without_facts,
)
from gates.registry import LOCAL, SUITE, known
from gates.remote import Server
from gates.verdict import Arm, Report

if TYPE_CHECKING:
    from gates.context import Context

NEEDLES = {
    "multi-needle": "dense, other pools, newest and random pages, fact excluded, other scorers, query tails, seams",
    "long-problem": "dense, newest and random pages, fact excluded, page tables shuffled",
}
TURNS = ("reuse", "resend")


def run(
    name: str, server: Server, options: GateOptions, say: Say, filler: Any, context: Context | None = None
) -> Report:
    """`name`'s black-box arms against `server`. `context`: for agreement, with the model that is served."""
    known([name], outside=True)
    if name == LOCAL:
        if context is None:
            raise ConfigError("agreement compares the server with this engine", "-m with the model that it serves")
        return black_box_agreement.run(server, context)
    report = new_report(name, server, options)
    say("ask once, to learn how the server counts", 0.0)
    count, ours = learn_counting(server)
    if name in TURNS:
        return black_box_turns.run(report, server, count, options, say)
    if name == SUITE:
        return black_box_suite.run(report, server, count, ours, options, say, filler)
    return _needles(report, server, count, ours, options, say, filler)


def _needles(
    report: Report, server: Server, count: Counter, ours: bool, options: GateOptions, say: Say, filler: Any
) -> Report:
    report.not_run.append(f"{NEEDLES[report.gate]}: they need the inside of the engine")
    long_problem = report.gate == "long-problem"
    tokens = fitted(server, options.length or (LONG_TOKENS if long_problem else GATE_TOKENS), report)
    tasks, trials = (("keyed", "disjoint"), 1) if options.quick else (TASKS, 3)
    arms: dict[tuple[str, str], Arm] = {}
    work = [(seed, task) for seed in options.seed_numbers for task in tasks]
    for number, (seed, task) in enumerate(work):
        depths = [DEPTH + SPREAD * (i - trials + 0.5) for i in range(2 * trials)] if long_problem else None
        try:
            document = build(task, tokens, count, seed, filler=filler, asked=2 * trials, depths=depths)
        except ValueError as error:
            raise ConfigError(str(error), "--length with more tokens, or another --haystack") from None
        for step, ask in enumerate(_asks(document, count, seed, filler, ours)):
            say(f"{task}: {ask.name}", (number + step / 4) / len(work))
            put(server, document, ask, arms.setdefault((task, ask.name), ask.new_arm(task)))
    report.arms = list(arms.values())
    report.checks = [prompt_length([arm for arm in report.arms if arm.kind == "positive"], tokens)]
    return report.judge()


def _asks(document: Document, count: Counter, seed: int, filler: Any, ours: bool) -> list[Ask]:
    short = build("keyed", SHORT, count, 10_000 + seed, filler=filler, asked=1).text

    def alone(fact: Fact, said: Said) -> list[Message]:
        head, _, tail = short.partition(". ")
        return over(document, f"{head}. {fact.text} {tail}", fact, said)

    asks = [
        Ask("short document", "dense", alone),
        Ask("long document", "positive", document.messages),
        Ask("facts left out", "control", without_facts(document), twin="long document"),
    ]
    if ours:
        asks.append(Ask("recall off", "control", document.messages, RECALL_OFF, "long document"))
    return asks
