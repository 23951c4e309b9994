"""Facts for training: three in five drawn by the gates' own generator, the others varied so that form is not learnt."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from gates import facts
from gates.facts import Fact
from gates.filler import ADJECTIVES, NOUNS, pseudo_word

ATTRIBUTES = """password|locker number|badge number|room number|serial number|door code|account number|security code|
registration number|secret number|pin|telephone number""".replace("\n", "").split("|")
LINE_NOUNS = ["Row", "Entry", "Item", "Record", "Section", "Cell", "Page", "Drawer", "Step", "Node"]
EXTRA_LINE_WORDING = "Line {key}: the value is {value}."
EXTRA_WORDINGS = (
    "{Key}: {value}.",
    "{Key} = {value}",
    "The access code of {key} is {value}.",
    "They said that the access code for {key} was {value} and left.",
    "{value} is the access code for {key}.",
)
EXTRA_QUESTIONS = (
    "Tell me the access code for {key}.",
    "What's the access code of {key}?",
    "Which access code does {key} have?",
    "Access code for {key}?",
    "What is the access code for {key}? Answer with the value only.",
)


def draw(rng: Random, task: str, count: int, taken: set[str]) -> list[Fact]:
    """`count` facts of a task (as many as it has), of the gates' form or varied."""
    if task == "lines":
        return _other_values(rng, _lines(rng, count, taken), taken)
    limit = {"keyed": len(facts.KEY_FIRST), "disjoint": len(facts.DISJOINT), "codes": len(facts.CODE_LABELS)}[task]
    drawn = facts.TASKS[task](rng, min(count, limit), taken)
    if task == "keyed" and rng.random() < 0.4:
        drawn = _vary(rng, drawn)
    return _other_values(rng, drawn, taken) if task != "codes" else drawn


def _other_values(rng: Random, drawn: list[Fact], taken: set[str]) -> list[Fact]:
    """One time in three, values of 4 to 7 digits that may begin alike, instead of the gates' five."""
    if rng.random() > 0.33:
        return drawn
    low, high = rng.choice(((5, 5), (5, 6), (4, 7)))
    out = []
    for fact in drawn:
        while (value := str(rng.randint(10 ** (low - 1), 10 ** rng.randint(low, high) - 1))) in taken:
            pass
        taken.add(value)
        out.append(replace(fact, text=fact.text.replace(fact.expected, value), expected=value))
    return out


def _vary(rng: Random, drawn: list[Fact]) -> list[Fact]:
    """Other keys (which may share a word), other attributes, other wordings and questions."""
    shared = rng.choice(facts.KEY_FIRST) if rng.random() < 0.3 else None
    attribute = rng.choice(ATTRIBUTES) if rng.random() < 0.5 else "access code"
    style, out, keys = rng.random(), [], set()
    for fact in drawn:
        while (key := _key(rng, style, shared, fact)) in keys:
            pass
        keys.add(key)
        parts = {"key": key, "Key": key.capitalize(), "value": fact.expected}
        text = rng.choice(facts.KEYED_WORDINGS + EXTRA_WORDINGS).format(**parts)
        question = rng.choice((facts.KEYED_QUESTION, *EXTRA_QUESTIONS)).format(key=key)
        out.append(
            replace(
                fact,
                key=key,
                text=text.replace("access code", attribute),
                question=question.replace("access code", attribute).replace("Access code", attribute.capitalize()),
            )
        )
    return out


def _key(rng: Random, style: float, shared: str | None, fact: Fact) -> str:
    if style < 0.4:
        first, second = shared or rng.choice(facts.KEY_FIRST), rng.choice(facts.KEY_SECOND + NOUNS)
    elif style < 0.7:
        first, second = shared or rng.choice(ADJECTIVES), rng.choice(NOUNS + facts.KEY_SECOND)
    elif style < 0.9:
        first, second = pseudo_word(rng), pseudo_word(rng)
    else:
        return fact.key
    return f"{first} {second}"


def _lines(rng: Random, count: int, taken: set[str]) -> list[Fact]:
    """Mostly lines from 1 in their order; else of another noun, from another number, shuffled."""
    if rng.random() < 0.7:
        return facts.lines(rng, count, taken)
    first = rng.randint(0, 99) if rng.random() < 0.7 else rng.randint(100, 900)
    noun = rng.choice(LINE_NOUNS) if rng.random() < 0.5 else "Line"
    wording = rng.choice((*facts.LINE_WORDINGS, EXTRA_LINE_WORDING))
    out = []
    for number in range(first, first + count):
        value = facts.digits(rng, taken)
        text = wording.format(key=number, value=value).replace("Line", noun)
        question = facts.LINE_QUESTION.format(key=number).replace("line", noun.lower())
        out.append(Fact("lines", str(number), text, question, value))
    if rng.random() < 0.6:
        rng.shuffle(out)
    return out
