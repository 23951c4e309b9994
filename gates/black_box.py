"""Gates from outside: the arms that any OpenAI-compatible server can be asked for, ours or another's.

The ceiling is the same fact in a short document; the control is the long document without the facts. What needs the
inside of an engine is listed as not run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from engine.errors import ConfigError
from gates import black_box_turns
from gates.haystack import GATE_TOKENS, Counter, Document, Fact, Message, build
from gates.long_problem import DEPTH, SPREAD
from gates.long_problem import TOKENS as LONG_TOKENS
from gates.multi_needle import TASKS
from gates.options import GateOptions
from gates.remote import Reply, Server
from gates.verdict import Arm, Check, Outcome, Report

SHORT = 600  # tokens of the ceiling's document
ANSWER = 48  # tokens: other models say more than the phantom
ROOM = 512
TURNS = ("reuse", "resend")
NAMES = ("multi-needle", "long-problem", *TURNS)
INSIDE = {
    "multi-needle": "dense, other pools, newest and random pages, fact excluded, other scorers, query tails, seams",
    "long-problem": "dense, newest and random pages, fact excluded, page tables shuffled",
}


@dataclass(frozen=True)
class Ask:
    """One way of asking: the kind of its arm, the document it asks about, and what goes along with the request."""

    name: str
    kind: str
    documents: Callable[[Fact], str | None]  # the text; None = the whole document
    extra: dict[str, Any]
    twin: str = ""


def run(name: str, server: Server, options: GateOptions, say: Callable[[str, float], None], filler: Any) -> Report:
    """`name`'s black-box arms against `server`."""
    if name not in NAMES:
        raise ConfigError(f"gate '{name}' needs the inside of the engine", f"with --base-url: {', '.join(NAMES)}")
    if name in TURNS:
        say("ask once, to learn how the server counts", 0.0)
        return black_box_turns.run(name, server, _counter(server)[0], options, say, filler)
    report = Report(
        name, environment={"served_model": PurePath(server.model).name, "seeds": list(options.seed_numbers)}
    )
    report.not_run.append(f"{INSIDE[name]}: they need the inside of the engine")
    say("ask once, to learn how the server counts", 0.0)
    count, ours = _counter(server)
    wanted = options.length or (GATE_TOKENS if name == "multi-needle" else LONG_TOKENS)
    tokens = min(wanted, server.context - ROOM) if server.context else wanted
    if tokens < wanted:
        report.notes.append(f"{tokens:,} tokens instead of {wanted:,}: the server's context is {server.context:,}")
    tasks, trials = (("keyed", "disjoint"), 1) if options.quick else (TASKS, 3)
    arms: dict[tuple[str, str], Arm] = {}
    work = [(seed, task) for seed in options.seed_numbers for task in tasks]
    for number, (seed, task) in enumerate(work):
        depths = [DEPTH + SPREAD * (i - trials + 0.5) for i in range(2 * trials)] if name == "long-problem" else None
        try:
            document = build(task, tokens, count, seed, filler=filler, asked=2 * trials, depths=depths)
        except ValueError as error:
            raise ConfigError(str(error), "--length with more tokens, or another --haystack") from None
        for step, ask in enumerate(_asks(document, count, seed, filler, ours)):
            say(f"{task}: {ask.name}", (number + step / 4) / len(work))
            red = 0.25 if ask.kind == "control" else 0.0
            arm = arms.setdefault((task, ask.name), Arm(ask.name, task, ask.kind, twin=ask.twin, red_share=red))
            _run(server, document, ask, arm)
    report.arms = list(arms.values())
    report.checks = _instrument(report.arms, tokens)
    return report.judge()


def _counter(server: Server) -> tuple[Counter, bool]:
    """How many characters this model takes a token for, from one answered request; and whether it is ours."""
    text = build("keyed", SHORT, _by_length(4.0), 99, asked=2).text
    reply = server.ask([{"role": "user", "content": text + "\n\nIs this clear?"}], 4)
    if reply.fault or not reply.prompt_tokens:
        raise ConfigError(
            f"the server doesn't answer a prompt of {len(text):,} characters: {reply.fault or 'it counts no tokens'}",
            "look at its log; it must fill in usage.prompt_tokens",
        )
    return _by_length(len(text) / reply.prompt_tokens), reply.ours


def _by_length(characters: float) -> Counter:
    def prompt(messages: Sequence[Message]) -> int:
        return round(sum(len(message["content"]) for message in messages) / characters) + 12 * len(messages)

    return Counter(lambda text: round(len(text) / characters), prompt)


def _asks(document: Document, count: Counter, seed: int, filler: Any, ours: bool) -> list[Ask]:
    short = build("keyed", SHORT, count, 10_000 + seed, filler=filler, asked=1).text

    def alone(fact: Fact) -> str:
        head, _, tail = short.partition(". ")
        return f"{head}. {fact.text} {tail}"

    without = document.text
    for fact in document.asked:
        without = without.replace(fact.text, "", 1)
    asks = [
        Ask("short document", "dense", alone, {}),
        Ask("long document", "positive", lambda fact: None, {}),
        Ask("facts left out", "control", lambda fact: without, {}, "long document"),
    ]
    if ours:
        off = {"kvring": {"decode": "window", "prefill": "window"}}
        asks.append(Ask("recall off", "control", lambda fact: None, off, "long document"))
    return asks


def _run(server: Server, document: Document, ask: Ask, arm: Arm) -> None:
    began = time.perf_counter()
    first = not arm.outcomes
    for trial in document.trials():
        said: list[tuple[Fact, str]] = []
        for turn, fact in enumerate(trial, 1):
            messages = document.messages(fact, said)
            if (text := ask.documents(fact)) is not None:
                messages[0] = {**messages[0], "content": messages[0]["content"].replace(document.text, text, 1)}
            reply = server.ask(messages, ANSWER, **ask.extra)
            arm.outcomes.append(_outcome(document, fact, turn, reply))
            said.append((fact, reply.text))
            arm.hidden_pages = reply.hidden_pages if first else min(arm.hidden_pages, reply.hidden_pages)
            first = False
            if reply.fault:
                arm.note = reply.fault
    arm.seconds += time.perf_counter() - began


def _outcome(document: Document, fact: Fact, turn: int, reply: Reply) -> Outcome:
    hit = fact.answered(reply.text)
    cut = not hit and (bool(reply.fault) or not reply.text.strip() or reply.finish == "length")
    said = reply.fault or reply.text
    depth = round(document.depth(fact), 4)
    return Outcome(document.seed, reply.prompt_tokens, turn, depth, fact.expected, said, hit, cut)


def _instrument(arms: Sequence[Arm], tokens: int) -> list[Check]:
    """The long prompts were as long as they should be; a server that cuts them short answers another question."""
    lengths = [outcome.tokens for arm in arms if arm.kind == "positive" for outcome in arm.outcomes if outcome.tokens]
    shortest, longest = min(lengths, default=0), max(lengths, default=0)
    detail = f"{shortest:,} to {longest:,} tokens by the server's count, {tokens:,} asked"
    return [Check("instrument, prompt length", not lengths or shortest >= 0.9 * tokens, detail)]
