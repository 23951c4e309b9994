"""Seeded documents with facts in them, to an exact length, and the questions and expected values that go with them.

One source of truth for the gates and for the phantom's training: `build` writes the document and returns where each
fact stands; facts come from gates.facts, the text around them from gates.filler. Everything is a pure function of its
arguments. What always holds: no value occurs twice, no filler names a key or holds a value, each fact is found at its
span, and `tokens` is the true length of the first question's prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from gates.facts import TASKS, Fact, collision_pattern, matches
from gates.filler import FILLERS, Filler

__all__ = ["GATE_TOKENS", "TASKS", "Counter", "Document", "Fact", "Placed", "build", "chat_counter", "matches"]

GATE_TOKENS = 42_355  # the prompt of multi-needle
HEAD_TOKENS, TAIL_TOKENS = 256, 2_500  # no fact in these: sink and recent pages would show it
LINES = 400
_PAD = " so"  # one token in most vocabularies
Message = dict[str, str]


@dataclass(frozen=True)
class Counter:
    """How a model counts: `text` for a bare string, `prompt` for messages with their template and the answer's head."""

    text: Callable[[str], int]
    prompt: Callable[[Sequence[Message]], int]


def chat_counter(encode: Callable[[str], Sequence[int]]) -> Counter:
    """A counter for `<|im_start|>role\\n...<|im_end|>\\n` over any `encode(text) -> ids` that knows these specials."""

    def prompt(messages: Sequence[Message]) -> int:
        turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        return len(encode(turns + "<|im_start|>assistant\n"))

    return Counter(lambda text: len(encode(text)), prompt)


@dataclass(frozen=True)
class Placed:
    """A fact in its document: the characters it takes, those of its value, and its depth (0..1, by characters)."""

    fact: Fact
    span: tuple[int, int]
    value_span: tuple[int, int]
    depth: float


@dataclass(frozen=True)
class Document:
    """`asked` are the facts to ask for, in the order of asking; the others (further lines) are look-alikes."""

    task: str
    seed: int
    filler: str
    text: str
    placed: tuple[Placed, ...]
    asked: tuple[Fact, ...]
    tokens: int
    target: int

    def turn(self, number: int, turns: int = 2) -> tuple[Fact, ...]:
        """The facts of turn `number` (from 1), when the asked ones are dealt evenly over `turns`."""
        size = len(self.asked) // turns
        return self.asked[(number - 1) * size : number * size]

    def messages(self, fact: Fact, earlier: Sequence[tuple[Fact, str]] = ()) -> list[Message]:
        """The conversation that asks for `fact` after `earlier` (fact, answer) turns; the document opens it."""
        turns: list[Message] = []
        for past, answer in earlier:
            turns += [{"role": "user", "content": past.question}, {"role": "assistant", "content": answer}]
        turns.append({"role": "user", "content": fact.question})
        turns[0] = {"role": "user", "content": f"{self.text}\n\n{turns[0]['content']}"}
        return turns

    def trials(self) -> list[tuple[Fact, ...]]:
        """Two turns each where the number of facts allows, else one."""
        if len(self.asked) % 2:
            return [(fact,) for fact in self.asked]
        return list(zip(self.turn(1), self.turn(2), strict=True))

    def where(self, fact: Fact) -> Placed:
        return next(placed for placed in self.placed if placed.fact == fact)

    def depth(self, fact: Fact) -> float:
        return self.where(fact).depth


def build(
    task: str,
    tokens: int,
    count: Counter,
    seed: int,
    *,
    filler: str | Filler = "prose",
    asked: int = 12,
    depths: Sequence[float] | None = None,
    lines: int = LINES,
    seam: int | None = None,
) -> Document:
    """A document whose first question makes a prompt of `tokens` tokens, as nearly as the vocabulary allows.

    `asked` facts are spread evenly, or stand at `depths` (fractions of the document's tokens). Task `lines` writes
    `lines` of them (fewer where the length forbids) and asks for some. With `seam` (a page's tokens) each asked value
    is moved across a page boundary. Raises ValueError where the facts don't fit.
    """
    kind = FILLERS[filler] if isinstance(filler, str) else filler
    asked = len(depths) if depths is not None else asked
    for attempt in itertools.count():
        rng = Random(f"{task}/{seed}/{kind.name}/{attempt}")
        facts, chosen = _draw(task, rng, tokens, asked, lines, depths)
        units = _units(kind, rng, facts, tokens, count)
        if units is not None:
            break
        if attempt == 20:
            raise ValueError(f"the filler '{kind.name}' collides with every set of facts drawn")
    order = list(chosen)
    rng.shuffle(order)
    pieces = _interleave(units, facts, chosen, depths, tokens, kind.joiner, count)
    if seam:
        pieces = _across_seams(pieces, set(chosen), kind.joiner, count, seam)
    text, total = _to_length(pieces, kind.joiner, order[0].question, tokens, count)
    return Document(task, seed, kind.name, text, _locate(text, facts), tuple(order), total, tokens)


def _draw(
    task: str, rng: Random, tokens: int, asked: int, lines: int, depths: Sequence[float] | None
) -> tuple[list[Fact], list[Fact]]:
    """All facts in the order of the document, and those to ask for, in the same order."""
    if tokens < 40 * asked:
        raise ValueError(f"{asked} facts don't fit {tokens} tokens; ask fewer or allow {40 * asked}")
    if task != "lines":
        facts = TASKS[task](rng, asked, set())
        return facts, facts
    facts = TASKS[task](rng, max(asked, min(lines, tokens // 24)), set())
    if depths is None:
        return facts, [facts[index] for index in sorted(rng.sample(range(len(facts)), asked))]
    wanted = sorted(round(depth * (len(facts) - 1)) for depth in depths)
    if len(set(wanted)) < len(wanted):
        raise ValueError(f"{len(facts)} lines are too few for {asked} different ones at these depths")
    return facts, [facts[index] for index in wanted]


def _units(kind: Filler, rng: Random, facts: list[Fact], tokens: int, count: Counter) -> list[tuple[str, int]] | None:
    """Filler units with their token counts, `tokens` in all; None where the filler can't be kept from the facts."""
    sizes: dict[str, int] = {}
    units: list[tuple[str, int]] = []
    total = rejected = 0
    stream, collision = kind.stream(rng), collision_pattern(facts)
    while total < tokens:
        unit = next(stream)
        if unit not in sizes:
            sizes[unit] = 0 if collision.search(unit) else count.text(kind.joiner + unit)
        if sizes[unit]:
            units.append((unit, sizes[unit]))
            total += sizes[unit]
        elif (rejected := rejected + 1) > 100 + len(units):
            return None
    return units


def _interleave(
    units: list[tuple[str, int]],
    facts: list[Fact],
    chosen: list[Fact],
    depths: Sequence[float] | None,
    tokens: int,
    joiner: str,
    count: Counter,
) -> list[str | Fact]:
    """Units with the facts among them: at `depths`, or evenly between the head and the tail that stay free."""
    head, tail = min(HEAD_TOKENS, tokens // 8), min(TAIL_TOKENS, tokens // 4)
    if depths is None or len(facts) != len(chosen):
        last = tokens - tail - max(size for _, size in units) - count.text(facts[-1].text) - 40
        step = max(0, last - head) / max(1, len(facts) - 1)
        goals = [head + step * index for index in range(len(facts))]
    else:
        goals = [tokens * depth for depth in depths]
    pieces: list[str | Fact] = []
    at, queue = 0, sorted(zip(goals, range(len(facts)), strict=True))
    for unit, size in units:
        while queue and at >= queue[0][0]:
            fact = facts[queue.pop(0)[1]]
            pieces.append(fact)
            at += count.text(joiner + fact.text)
        if at + size > tokens and not queue:
            break
        pieces.append(unit)
        at += size
    return pieces + [facts[index] for _, index in queue]


def _across_seams(
    pieces: list[str | Fact], chosen: set[Fact], joiner: str, count: Counter, page: int
) -> list[str | Fact]:
    """Pad before each asked fact so that its value begins two tokens before a page ends."""
    head = count.prompt([{"role": "user", "content": ""}]) // 2  # the template before the text, about
    out: list[str | Fact] = []
    at = head
    for piece in pieces:
        text = piece if isinstance(piece, str) else piece.text
        if isinstance(piece, Fact) and piece in chosen:
            before = count.text(joiner + text[: text.index(piece.expected)].rstrip())
            missing = (page - 2 - at - before) % page
            if missing:
                pad = (_PAD * missing).strip()
                out.append(pad)
                at += count.text(joiner + pad)
        out.append(piece)
        at += count.text(joiner + text)
    return out


def _to_length(pieces: list[str | Fact], joiner: str, question: str, tokens: int, count: Counter) -> tuple[str, int]:
    """The text whose prompt with `question` has `tokens` tokens: filler is taken from the end, then pads are added."""
    parts = [piece if isinstance(piece, str) else piece.text for piece in pieces]
    loose = len(pieces) - max((i for i, piece in enumerate(pieces) if isinstance(piece, Fact)), default=-1) - 1

    def measured(text: str) -> int:
        return count.prompt([{"role": "user", "content": f"{text}\n\n{question}"}])

    text = joiner.join(parts)
    total = measured(text)
    while total > tokens and loose:
        dropped = 0
        while loose and dropped < total - tokens:
            dropped += count.text(joiner + parts.pop())
            loose -= 1
        text = joiner.join(parts)
        total = measured(text)
    best, pads = (total, text), tokens - total
    for _ in range(8):
        padded = text + _PAD * max(0, pads)
        total = measured(padded)
        if abs(total - tokens) < abs(best[0] - tokens):
            best = total, padded
        if total == tokens or pads <= 0:
            break
        pads += tokens - total
    return best[1], best[0]


def _locate(text: str, facts: list[Fact]) -> tuple[Placed, ...]:
    """Where each fact stands; each must stand there exactly once."""
    placed = []
    for fact in facts:
        start = text.index(fact.text)
        value = start + fact.text.rindex(fact.expected)
        if text.count(fact.text) != 1 or not matches(text, fact.expected):
            raise ValueError(f"'{fact.text}' doesn't stand exactly once in the document")
        spans = (start, start + len(fact.text)), (value, value + len(fact.expected))
        placed.append(Placed(fact, *spans, start / len(text)))
    return tuple(placed)
