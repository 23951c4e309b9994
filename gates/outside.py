"""What the black-box gates share: how a server counts, how long a prompt it takes, what its replies make of an arm."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from engine.errors import ConfigError
from gates.arms import Exam, Question
from gates.haystack import Counter, Document, Fact, Message, build
from gates.options import GateOptions
from gates.remote import Reply, Server
from gates.verdict import Arm, Check, Outcome, Report

SHORT = 600  # tokens of a document that any model should see whole
ANSWER = 48  # tokens: other models say more than the phantom
ROOM = 512  # tokens of a server's context beside the document

Say = Callable[[str, float], None]
Said = Sequence[tuple[Question, str]]
RECALL_OFF = {"kvring": {"decode": "window", "prefill": "window"}}
EXACT = {"kvring": {"decode": "exact", "prefill": "exact"}}
"""What our own server takes beside a request; another ignores or refuses it, and is not asked."""


@dataclass(frozen=True)
class Ask:
    """One way of asking: the kind of its arm, the messages of a question, and what goes along with the request."""

    name: str
    kind: str
    messages: Callable[[Question, Said], list[Message]]
    extra: dict[str, Any] = field(default_factory=dict)
    twin: str = ""

    def new_arm(self, task: str) -> Arm:
        return Arm(self.name, task, self.kind, twin=self.twin, red_share=0.25 if self.kind == "control" else 0.0)


def new_report(gate: str, server: Server, options: GateOptions) -> Report:
    environment = {"served_model": PurePath(server.model).name, "seeds": list(options.seed_numbers)}
    return Report(gate, environment=environment)


def learn_counting(server: Server) -> tuple[Counter, bool]:
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


def fitted(server: Server, wanted: int, report: Report) -> int:
    """`wanted` tokens, or what the server's context holds where that is less; said in the report."""
    if not server.context or wanted <= server.context - ROOM:
        return wanted
    tokens = server.context - ROOM
    report.notes.append(f"{tokens:,} tokens instead of {wanted:,}: the server's context is {server.context:,}")
    return tokens


def put(server: Server, exam: Exam, ask: Ask, arm: Arm, answer: int = ANSWER) -> None:
    """All trials of an exam, asked one way; added to `arm`."""
    began = time.perf_counter()
    first = not arm.outcomes
    for trial in exam.trials():
        said: list[tuple[Question, str]] = []
        for turn, question in enumerate(trial, 1):
            reply = server.ask(ask.messages(question, said), answer, **ask.extra)
            arm.outcomes.append(judged(exam, question, turn, reply))
            said.append((question, reply.text))
            arm.hidden_pages = reply.hidden_pages if first else min(arm.hidden_pages, reply.hidden_pages)
            first = False
            if reply.fault:
                arm.note = reply.fault
    arm.seconds += time.perf_counter() - began


def over(document: Document, text: str, fact: Fact, said: Said = ()) -> list[Message]:
    """The question over another text than the document's own."""
    first, *later = document.messages(fact, said)
    return [{**first, "content": first["content"].replace(document.text, text, 1)}, *later]


def without_facts(document: Document) -> Callable[[Fact, Said], list[Message]]:
    """Messages as the document's, over its text without the facts that are asked for."""
    text = document.text
    for fact in document.asked:
        text = text.replace(fact.text, "", 1)
    return lambda fact, said=(): over(document, text, fact, said)


def judged(exam: Exam, question: Question, turn: int, reply: Reply) -> Outcome:
    hit = question.answered(reply.text)
    cut = not hit and (bool(reply.fault) or not reply.text.strip() or reply.finish == "length")
    said = reply.fault or reply.text
    depth = round(exam.depth(question), 4)
    return Outcome(exam.seed, reply.prompt_tokens, turn, depth, question.expected, said, hit, cut)


def prompt_length(arms: Sequence[Arm], tokens: int) -> Check:
    """The long prompts were as long as they should be; a server that cuts them short answers another question."""
    lengths = [outcome.tokens for arm in arms for outcome in arm.outcomes if outcome.tokens]
    shortest, longest = min(lengths, default=0), max(lengths, default=0)
    detail = f"{shortest:,} to {longest:,} tokens by the server's count, {tokens:,} asked"
    return Check("instrument, prompt length", not lengths or shortest >= 0.9 * tokens, detail)
