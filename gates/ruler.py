"""Longer tasks in the manner of RULER (arXiv 2404.06654), seeded, without downloads: what a look-up alone can't do.

A Paper is one conversation with its questions; `PAPERS` makes them by task. Facts stand evenly between a head and a
tail that stay free of them, so that sink and recent pages never show one. An answer is right when it holds every value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from string import ascii_uppercase

from gates.facts import KEY_FIRST, KEY_SECOND, KEYED_QUESTION, digits, keyed, matches
from gates.filler import ADJECTIVES, FILLERS, NOUNS, VERBS, Filler
from gates.haystack import Counter, Message

ASKED = 6
VALUES = 4  # of one question
CHAIN = 5  # variables
TURNS = 30
FREQUENT = 3  # words
REPEATED = 8  # identical requests


@dataclass(frozen=True)
class Ask:
    """One question; right with every one of `values` in the answer. depth: of its first fact, 0..1."""

    text: str
    values: tuple[str, ...]
    depth: float

    @property
    def expected(self) -> str:
        return ", ".join(self.values)

    def answered(self, text: str) -> bool:
        return all(matches(text, value) for value in self.values)


@dataclass(frozen=True)
class Paper:
    """`turns` are said and closed; `text` opens the last turn, which ends with the question."""

    task: str
    seed: int
    turns: tuple[tuple[str, str], ...]
    text: str
    asks: tuple[Ask, ...]
    tokens: int

    def trials(self) -> list[tuple[Ask]]:
        return [(ask,) for ask in self.asks]

    def messages(self, ask: Ask, earlier: Sequence[tuple[Ask, str]] = ()) -> list[Message]:
        said = [*self.turns, *((past.text, answer) for past, answer in earlier)]
        messages: list[Message] = []
        for question, answer in said:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        last = f"{self.text}\n\n{ask.text}" if self.text else ask.text
        return [*messages, {"role": "user", "content": last}]

    def depth(self, ask: Ask) -> float:
        return ask.depth


@dataclass(frozen=True)
class Draft:
    """What a paper is made from."""

    rng: Random
    tokens: int
    count: Counter
    filler: Filler
    asked: int

    def units(self, forbidden: Sequence[str], tokens: int) -> list[tuple[str, int]]:
        """Filler with token counts, `tokens` in all, without the forbidden words, however they are written; ValueError
        if there is none such.
        """
        units, total, rejected = [], 0, 0
        forbidden = [word.casefold() for word in forbidden]
        for unit in self.filler.stream(self.rng):
            if total >= tokens:
                break
            folded = unit.casefold()
            if any(word in folded for word in forbidden):
                rejected += 1
                if rejected > 100 + len(units):
                    raise ValueError(f"the filler '{self.filler.name}' holds the facts themselves")
                continue
            size = self.count.text(self.filler.joiner + unit)
            units.append((unit, size))
            total += size
        return units

    def spread(self, statements: Sequence[str], forbidden: Sequence[str]) -> tuple[str, list[float]]:
        """Filler with the statements in it, in their order and evenly; each one's depth."""
        joiner = self.filler.joiner
        sizes = [self.count.text(joiner + statement) for statement in statements]
        room = self.tokens - sum(sizes) - 80
        if room < self.tokens // 4:
            raise ValueError(f"{len(statements)} statements don't fit {self.tokens:,} tokens")
        head, tail = min(256, self.tokens // 8), min(2_500, self.tokens // 4)
        step = max(0, room - head - tail) / max(1, len(statements) - 1)
        pieces, depths, at, done = [], [], 0, 0
        for unit, size in self.units(forbidden, room):
            while done < len(statements) and at >= head + step * done:
                depths.append(min(1.0, (at + sum(sizes[:done])) / self.tokens))
                pieces.append(statements[done])
                done += 1
            pieces.append(unit)
            at += size
        depths += [1.0] * (len(statements) - done)
        return joiner.join([*pieces, *statements[done:]]), depths


Made = tuple[tuple[tuple[str, str], ...], str, list[Ask]]
"""Turns, text and questions."""


def multi_value(draft: Draft) -> Made:
    """Four codes for each key, said in four places."""
    rng, taken = draft.rng, set()
    keys = [
        f"{a} {b}" for a, b in zip(rng.sample(KEY_FIRST, draft.asked), rng.sample(KEY_SECOND, draft.asked), strict=True)
    ]
    values = {key: tuple(digits(rng, taken) for _ in range(VALUES)) for key in keys}
    said = [(key, value) for key in keys for value in values[key]]
    rng.shuffle(said)
    text, depths = draft.spread([f"One of the access codes for {k} is {v}." for k, v in said], [*keys, *taken])
    first = {key: depths[next(i for i, (k, _) in enumerate(said) if k == key)] for key in keys}
    asks = [Ask(f"What are all {VALUES} access codes for {key}?", values[key], first[key]) for key in keys]
    return (), text, asks


def multi_query(draft: Draft) -> Made:
    """Four keys in one question."""
    facts = keyed(draft.rng, min(len(KEY_FIRST), VALUES * draft.asked), set())
    text, depths = draft.spread([fact.text for fact in facts], [word for f in facts for word in (f.key, f.expected)])
    asks = []
    for _ in range(draft.asked):
        chosen = draft.rng.sample(range(len(facts)), VALUES)
        *most, last = (facts[index].key for index in chosen)
        question = f"What are the access codes for {', '.join(most)} and {last}?"
        asks.append(Ask(question, tuple(facts[index].expected for index in chosen), depths[min(chosen)]))
    return (), text, asks


def variables(draft: Draft) -> Made:
    """Chains of assignments; which variables hold a value?"""
    rng, taken, names = draft.rng, set(), set()
    while len(names) < CHAIN * draft.asked:
        names.add("".join(rng.sample(ascii_uppercase, 5)))
    order = sorted(names)
    rng.shuffle(order)
    chains = [order[at : at + CHAIN] for at in range(0, len(order), CHAIN)]
    values = [digits(rng, taken) for _ in chains]
    said = []
    for step in range(CHAIN):
        for chain, value in zip(chains, values, strict=True):
            said.append(f"VAR {chain[step]} = {value}." if step == 0 else f"VAR {chain[step]} = VAR {chain[step - 1]}.")
    text, depths = draft.spread(said, [*names, *taken])
    asks = [
        Ask(f"Which {CHAIN} variables have the value {value}, directly or through others?", tuple(chain), depth)
        for chain, value, depth in zip(chains, values, depths, strict=False)
    ]
    return (), text, asks


def frequent(draft: Draft) -> Made:
    """A list of words in which three stand out; one question only, since the list has one answer."""
    rng = draft.rng
    pool = sorted({*NOUNS, *ADJECTIVES, *VERBS})
    rng.shuffle(pool)
    top, rest = pool[:FREQUENT], pool[FREQUENT : FREQUENT + 80]
    words: list[str] = []
    block = [*rest, *(word for word in top for _ in range(8))]
    size = draft.count.text(" " + " ".join(block))
    for _ in range(max(1, (draft.tokens - 80) // size)):
        rng.shuffle(block)
        words += block
    question = f"Which {FREQUENT} words occur most often in the list above?"
    return (), "Words: " + " ".join(words), [Ask(question, tuple(top), 0.5)]


def key_values(draft: Draft) -> Made:
    """A JSON object of random keys and values."""
    rng = draft.rng

    def code() -> str:
        return f"{rng.getrandbits(32):08x}-{rng.getrandbits(16):04x}"

    sample = [f'\n"{code()}": "{code()}",' for _ in range(64)]  # one alone may be a tenth shorter than most
    size = draft.count.text("".join(sample)) / len(sample)
    pairs = {code(): code() for _ in range(max(draft.asked, int((draft.tokens - 120) / (size + 0.1))))}
    text = "{\n" + ",\n".join(f'"{key}": "{value}"' for key, value in pairs.items()) + "\n}"
    keys = list(pairs)
    inside = range(len(keys) // 20, max(len(keys) // 20 + draft.asked, 3 * len(keys) // 4))
    asks = [
        Ask(f'What is the value of "{keys[at]}" in the JSON object above?', (pairs[keys[at]],), at / len(keys))
        for at in sorted(rng.sample(inside, draft.asked))
    ]
    return (), text, asks


def nth_request(draft: Draft) -> Made:
    """The same request several times in one conversation; what was the n-th answer?"""
    rng, taken = draft.rng, set()
    topics = rng.sample(NOUNS, 4)
    asked, others = topics[0], topics[1:]
    codes = [digits(rng, taken) for _ in range(REPEATED)]
    requests = [(asked, code) for code in codes]
    for _ in range(REPEATED):
        requests.insert(rng.randint(0, len(requests)), (rng.choice(others), digits(rng, taken)))
    each = max(40, (draft.tokens - 200) // len(requests) - 30)
    turns, places = [], []
    for at, (topic, code) in enumerate(requests):
        if topic == asked:
            places.append(at / len(requests))
        body = draft.filler.joiner.join(unit for unit, _ in draft.units([*taken, *topics], each))
        turns.append((f"Write a note about the {topic}.", f"Note {code} about the {topic}. {body}"))
    names = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
    chosen = sorted(rng.sample(range(REPEATED - 1), min(draft.asked, REPEATED - 1)))
    asks = [
        Ask(f"What was the number of the {names[at]} note about the {asked}?", (codes[at],), places[at])
        for at in chosen
    ]
    return tuple(turns), "", asks


def conversation(draft: Draft) -> Made:
    """Thirty long turns, a fact in each; some are asked for at the end."""
    facts = keyed(draft.rng, TURNS, set())
    forbidden = [word for fact in facts for word in (fact.key, fact.expected)]
    each = max(20, (draft.tokens - 100) // TURNS - 45)
    turns = []
    for fact in facts:
        units = [unit for unit, _ in draft.units(forbidden, each)]
        units.insert(draft.rng.randint(0, len(units)), fact.text)
        turns.append((draft.filler.joiner.join(units), "Noted."))
    chosen = sorted(draft.rng.sample(range(1, TURNS * 3 // 4), draft.asked))
    asks = [Ask(KEYED_QUESTION.format(key=facts[at].key), (facts[at].expected,), at / TURNS) for at in chosen]
    return tuple(turns), "", asks


PAPERS: dict[str, tuple[Callable[[Draft], Made], int]] = {
    "multi-value": (multi_value, 64),
    "multi-query": (multi_query, 64),
    "variables": (variables, 64),
    "frequent": (frequent, 48),
    "key-values": (key_values, 32),
    "nth-request": (nth_request, 24),
    "conversation": (conversation, 24),
}
"""By task: the generator, and the tokens that an answer may take."""


def make_paper(task: str, tokens: int, count: Counter, seed: int, filler: Filler | str, asked: int = ASKED) -> Paper:
    """A paper of about `tokens` tokens, the same for the same arguments; ValueError where the facts don't fit."""
    kind = FILLERS[filler] if isinstance(filler, str) else filler
    make, _ = PAPERS[task]
    turns, text, asks = make(Draft(Random(f"{task}/{seed}/{kind.name}"), tokens, count, kind, asked))
    paper = Paper(task, seed, turns, text, tuple(asks), 0)
    longest = max(count.prompt(paper.messages(ask)) for ask in asks)
    return Paper(task, seed, turns, text, tuple(asks), longest)


def papers(task: str, seeds: Sequence[int], **more) -> Iterator[Paper]:
    """One paper a seed; a task with one question a paper gets `asked` of them, so that its trials are as many."""
    for seed in seeds:
        paper = make_paper(task, seed=seed, **more)
        yield paper
        for again in range(len(paper.asks), more.get("asked", ASKED) if len(paper.asks) == 1 else 0):
            yield make_paper(task, seed=1000 * again + seed, **more)
