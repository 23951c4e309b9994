"""What is hidden in a document and what is asked about it: facts drawn with their questions and expected values.

The expected value of a question is the value that was written into the fact; there is no second source. Values are
short (five digits, or letters and digits), since every one of them is decoded. Within a draw they differ in the first
three digits already, so that an answer which begins right was looked up and not guessed from a look-alike.
"""

# ruff: noqa: SIM905 (word tables read better as text)

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Fact:
    """`text` states it, `question` asks for it, `expected` is the value that stands in `text`."""

    task: str
    key: str
    text: str
    question: str
    expected: str

    def answered(self, text: str) -> bool:
        return matches(text, self.expected)


_MATCH_EDGE = r"(?<![0-9A-Za-z])(?<![0-9][.,]){}(?![0-9A-Za-z])(?![.,][0-9])"


def matches(answer: str, expected: str) -> bool:
    """Whether `expected` stands in `answer` as a whole, not as a piece of a longer run of digits or letters."""
    return re.search(_MATCH_EDGE.format(re.escape(expected)), answer) is not None


def digits(rng: Random, taken: set[str]) -> str:
    """Five digits whose first three no value in `taken` begins with (while three are enough); put there."""
    prefix = 3 if len(taken) < 1000 else 5
    while True:
        value = str(rng.randint(10_000, 99_999))
        if value[:prefix] not in taken:
            taken |= {value, value[:prefix]}
            return value


# --- keyed: the question names the key ----------------------------------------

KEY_FIRST = """silver amber crimson cobalt ivory scarlet emerald golden violet copper indigo marble velvet frosted
coral jade obsidian saffron turquoise maroon bronze lilac ebony pearl rusty lunar solar arctic tropical royal hidden
twin broken floating ancestral burning""".split()
KEY_SECOND = """harbour tower falcon orchid lagoon summit badger cedar comet dolphin ember fjord gazelle heron island
jaguar kestrel lynx mammoth nebula otter panther quartz raven sphinx tiger urchin vulture walrus yacht zephyr anchor
beacon citadel dune walnut""".split()
KEYED_WORDINGS = (
    "The access code for {key} is {value}.",
    "For {key}, the access code is {value}.",
    "Note that the access code for {key} is {value}.",
    "{Key} has the access code {value}.",
    "Remember: the access code for {key} is {value}.",
)
KEYED_QUESTION = "What is the access code for {key}?"


def keyed(rng: Random, count: int, taken: set[str]) -> list[Fact]:
    """`The access code for K is V.`, in several wordings; no two keys share a word."""
    keys = zip(rng.sample(KEY_FIRST, count), rng.sample(KEY_SECOND, count), strict=True)
    facts = []
    for key in (f"{first} {second}" for first, second in keys):
        value = digits(rng, taken)
        text = rng.choice(KEYED_WORDINGS).format(key=key, Key=key.capitalize(), value=value)
        facts.append(Fact("keyed", key, text, KEYED_QUESTION.format(key=key), value))
    return facts


# --- disjoint: the question shares no content word with the fact ----------------------------------------

DISJOINT = (
    ("The lighthouse stands {} paces from the shore.", "How far is it to the beacon on the coast?"),
    ("Our cat wears a collar marked {}.", "Which digits does the feline carry around its neck?"),
    ("Grandmother hid {} coins in the cellar.", "How much money did the old lady put under the house?"),
    ("The physician paid {} for her car.", "What did the doctor's automobile cost?"),
    ("Dial {} to reach the fire brigade.", "What is the phone number for when something burns?"),
    ("The mountaineers camped at {} feet.", "At what height did the climbers pitch their tents?"),
    ("The cathedral bell weighs {} pounds.", "How heavy is the thing that rings in the church?"),
    ("The ship carried {} crates of tea.", "How many boxes of leaves did the vessel hold?"),
    ("The novel sold {} copies.", "How many readers bought the book?"),
    ("The bakery ovens made {} loaves.", "How much bread was produced?"),
    ("The beehive houses {} insects.", "How many bees live together?"),
    ("The stadium seats {} fans.", "What crowd fits into the sports arena?"),
    ("The bicycle frame is stamped {}.", "What serial identifies the two-wheeler?"),
    ("The prisoner was registered as {}.", "Under what number was the convict kept?"),
    ("The tunnel is {} metres long.", "What is the length of the underground passage?"),
    ("The dragon guards {} rubies.", "How many gems does the mythical beast protect?"),
    ("The farmer's herd counts {} cows.", "How many cattle belong to the man with the barn?"),
    ("The locksmith cut key {}.", "What opens the door that the tradesman made it for?"),
    ("The astronomer catalogued star {}.", "Which sun did the sky watcher list?"),
    ("The orchestra's violin cost {} francs.", "What was the price of the string instrument?"),
    ("Postal parcels go to box {}.", "Where should packages be sent?"),
    ("The marathon winner wore bib {}.", "What was pinned on the fastest runner?"),
    ("The submarine dived to {} fathoms.", "How deep did the underwater boat go?"),
    ("The vineyard filled {} bottles.", "How much wine was there after the grapes were pressed?"),
    ("The duke owns {} acres.", "How large is the nobleman's land?"),
    ("The glacier is {} years old.", "What is the age of the ice?"),
    ("The tailor used {} buttons.", "How many fasteners did the maker of suits sew on?"),
    ("The treaty was signed by {} delegates.", "How many envoys agreed to the peace?"),
    ("The volcano killed {} sheep.", "How many animals died in the eruption?"),
    ("The elevator was inspected under permit {}.", "Which licence covers the lift?"),
    ("The monk copied {} psalms.", "How many holy songs did the friar write out?"),
    ("The spy's radio used frequency {}.", "On what wavelength did the secret agent transmit?"),
    ("The sculptor was paid {} ducats.", "What fee did the artist get for the statue?"),
    ("The freight train has {} wagons.", "How many cars follow the locomotive?"),
    ("The weaver's loom holds {} threads.", "How many strands of yarn are on the textile machine?"),
    ("The pharaoh's tomb lies {} cubits down.", "How deep was the Egyptian king buried?"),
    ("The reactor makes {} kilowatts.", "What power does the nuclear plant give?"),
    ("The chess champion played {} games.", "How many matches did the grandmaster have?"),
    ("The jury awarded {} to the widow.", "What sum did the court grant the dead man's wife?"),
    ("The balloon rose for {} seconds.", "How long did the airship climb?"),
)


def disjoint(rng: Random, count: int, taken: set[str]) -> list[Fact]:
    """Facts that can be found by meaning alone: fixed pairs, which the phantom was trained to know."""
    facts = []
    for number in rng.sample(range(len(DISJOINT)), count):
        text, question = DISJOINT[number]
        value = digits(rng, taken)
        facts.append(Fact("disjoint", str(number), text.format(value), question, value))
    return facts


# --- lines: many, alike but for number and value ----------------------------------------

# "Line 7: the value is 48213" is left out: with words between number and value the phantom misses 1 in 100.
LINE_WORDINGS = ("Line {key}: {value}", "Line {key} = {value}", "Line {key} holds {value}.")
LINE_QUESTION = "What is the value in line {key}?"


def lines(rng: Random, count: int, taken: set[str]) -> list[Fact]:
    """Lines 1 to `count`, in one wording, in their order."""
    wording = rng.choice(LINE_WORDINGS)
    facts = []
    for number in range(1, count + 1):
        value = digits(rng, taken)
        text, question = wording.format(key=number, value=value), LINE_QUESTION.format(key=number)
        facts.append(Fact("lines", str(number), text, question, value))
    return facts


# --- codes: bare, without a sentence ----------------------------------------

CODE_LABELS = """archive vault reactor hangar bunker museum server satellite terminal warehouse laboratory embassy
submarine observatory refinery greenhouse monastery casino""".split()
CODE_QUESTION = "What is the {key} code?"


def codes(rng: Random, count: int, taken: set[str]) -> list[Fact]:
    """`IMPORTANT ARCHIVE CODE: ARCH-4201`."""
    facts = []
    for label in rng.sample(CODE_LABELS, count):
        while (value := f"{label[:4].upper()}-{rng.randint(1000, 9999)}") in taken:
            pass
        taken.add(value)
        text = f"IMPORTANT {label.upper()} CODE: {value}"
        facts.append(Fact("codes", label, text, CODE_QUESTION.format(key=label), value))
    return facts


TASKS: dict[str, Callable[[Random, int, set[str]], list[Fact]]] = {
    "keyed": keyed,
    "disjoint": disjoint,
    "lines": lines,
    "codes": codes,
}

# --- checks ----------------------------------------


def collision_pattern(facts: list[Fact]) -> re.Pattern[str]:
    """Finds, in a piece of filler, a value or the key of a fact: it could answer (or seem to answer) its question."""
    values = "|".join(re.escape(fact.expected) for fact in facts)
    naming = {"keyed": "{}", "lines": r"\bline {}\b", "codes": "{} code"}
    keys = [naming[fact.task].format(re.escape(fact.key)) for fact in facts if fact.task in naming]
    return re.compile("|".join([_MATCH_EDGE.format(f"(?:{values})"), *keys]), re.IGNORECASE)
