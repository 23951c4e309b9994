"""The text around the facts, by kind. It needs no file: every built-in kind is a seeded template.

A filler is an endless stream of units (sentences, lines) and the joiner that stands between them, so that a fact can
be set between two units and reads like one of them. The phantom is trained on all kinds but HELD_OUT, which are there
to show that it does not depend on the filler.
"""

# ruff: noqa: SIM905 (word tables read better as text)

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from engine.errors import ConfigError

Stream = Callable[[Random], Iterator[str]]

LONGEST_UNIT = 400  # characters of a user's text between two facts, whatever it has for sentences
MOST = 32 << 20
"""Characters that are read of a user's text, which is taken from its start: more than the longest context."""
HELD_OUT = ("log", "table")  # kinds that training never sees


@dataclass(frozen=True)
class Filler:
    """`stream(rng)` yields units without end, the same for the same state of `rng`."""

    name: str
    joiner: str
    stream: Stream


FILLERS: dict[str, Filler] = {}


def filler(name: str, joiner: str = " ") -> Callable[[Stream], Stream]:
    """Put a stream into the registry under `name`."""

    def register(stream: Stream) -> Stream:
        FILLERS[name] = Filler(name, joiner, stream)
        return stream

    return register


def text_filler(text: str, name: str = "text") -> Filler:
    """Any text as a filler: its sentences or lines in their order, from the start again at the end."""
    sentences = (unit.strip() for unit in re.split(r"(?<=[.!?])\s+|(?<=[。！？])\s*|\n+", text))
    units = [unit[at : at + LONGEST_UNIT] for unit in sentences for at in range(0, len(unit), LONGEST_UNIT)]
    if not units:
        raise ValueError("the filler text is empty")

    def stream(rng: Random) -> Iterator[str]:
        while True:
            yield from units

    return Filler(name, "\n" if "\n" in text.strip() else " ", stream)


def read_filler(path: str | None) -> str | Filler:
    """A text file as filler, or prose; ConfigError where it can't be. Its name is not kept: reports name no paths."""
    if path is None:
        return "prose"
    try:
        with Path(path).open(encoding="utf-8-sig") as file:
            return text_filler(file.read(MOST), "own text")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text", "convert it, or give another file") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}", "give a text file") from None
    except ValueError:
        raise ConfigError(f"{path} holds no text", "give a file with a few sentences or lines") from None


# --- words ------------------------------------------------------------

NOUNS = """river garden station letter market kitchen teacher window bridge museum valley orchard engine village island
library forest captain painter carpenter doctor machine printer theatre ticket ladder basket blanket mirror curtain
festival journey harvest cottage factory railway merchant student neighbour musician gardener pharmacy bakery shelter
meadow canyon glacier desert lantern compass notebook envelope furniture instrument committee council newspaper
weather summer autumn evening morning winter story question answer problem reason method pattern""".split()
ADJECTIVES = """quiet narrow early simple careful distant gentle hollow modern ancient patient curious familiar regular
steady ordinary separate bright cheerful crooked dusty empty faded gloomy honest humble local muddy noisy pleasant
proud rapid rough shallow slender sturdy sudden tidy upper weary wooden young""".split()
VERBS = """watched followed described repaired carried visited remembered painted measured collected ignored opened
borrowed admired examined crossed finished discussed reached studied cleaned prepared delivered replaced noticed
explained supported avoided improved""".split()
ADVERBS = """slowly often quietly rarely gladly again together carefully yesterday usually twice eagerly politely soon
elsewhere""".split()
PLACES = """near the old mill|behind the school|across the square|along the canal|under the arches|by the northern road|
in the upper town|outside the gate|at the edge of the field|beside the fountain""".replace("\n", "").split("|")
PROSE = (
    "The {a} {n} {v} the {n} {p}.",
    "{D}, the {n} {v} a {a} {n}, and nobody in the {n} was surprised.",
    "When the {n} {v} the {a} {n}, the {n} {d} {v} it too.",
    "It was a {a} {n}, and every {n} {p} {v} it {d}.",
    "A {n} without a {n} is like a {a} {n} without a {n}.",
    "Some say that the {n} {v} the {n} because the {n} was too {a}.",
    "In the {n} they {d} {v} what the {a} {n} had left {p}.",
    "There is no {n} so {a} that a {a} {n} has not {v} it.",
    "Each {n} has its {n}; the {a} one {d} {v} both.",
)


def _fill(rng: Random, template: str) -> str:
    tables = {"n": NOUNS, "a": ADJECTIVES, "v": VERBS, "d": ADVERBS, "p": PLACES}

    def word(match: re.Match[str]) -> str:
        key = match.group(1)
        chosen = rng.choice(tables[key.lower()])
        return chosen.capitalize() if key.isupper() else chosen

    return re.sub(r"\{(\w)\}", word, template)


def pseudo_word(rng: Random) -> str:
    """A pronounceable word of no language."""
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(1, 4)))


def _sentence(rng: Random, words: list[str]) -> str:
    return " ".join(rng.choice(words) for _ in range(rng.randint(4, 14))).capitalize() + "."


# --- kinds ------------------------------------------------------------


@filler("prose")
def _prose(rng: Random) -> Iterator[str]:
    while True:
        yield _fill(rng, rng.choice(PROSE))


@filler("words16")
def _words16(rng: Random) -> Iterator[str]:
    words = rng.sample(NOUNS + ADJECTIVES + VERBS, 16)
    while True:
        yield _sentence(rng, words)


@filler("vocabulary")
def _vocabulary(rng: Random) -> Iterator[str]:
    pool = NOUNS + ADJECTIVES + VERBS + ADVERBS
    size = round(2 ** rng.uniform(1, 6))
    words = rng.sample(pool, size) if rng.random() < 0.5 else [pseudo_word(rng) for _ in range(size)]
    while True:
        yield _sentence(rng, words)


@filler("repeated")
def _repeated(rng: Random) -> Iterator[str]:
    sentence = _fill(rng, rng.choice(PROSE))
    while True:
        yield sentence


@filler("numbered", "\n")
def _numbered(rng: Random) -> Iterator[str]:
    number = rng.randint(1, 50)
    form = rng.choice(("{}. {}", "({}) {}", "{}) {}", "Item {}. {}", "§{} {}", "{} - {}"))
    while True:
        yield form.format(number, _fill(rng, rng.choice(PROSE)))
        number += 1


@filler("code", "\n")
def _code(rng: Random) -> Iterator[str]:
    while True:
        name, other, thing = rng.choice(NOUNS), rng.choice(VERBS), rng.choice(ADJECTIVES)
        limit = rng.randint(0, 99)
        if rng.random() < 0.5:
            yield (
                f"def {other}_{name}(self, {thing}, limit={limit}):\n    if {thing} is None:\n"
                f"        raise ValueError('{name} is missing')\n"
                f"    for index, item in enumerate(self.{name}s):\n        if index > limit:\n"
                f"            self.{thing}[item] = {other}({name}=item, count={rng.randint(0, 9)})\n"
                f"    return [{name} for {name} in self.{name}s if {name}.{thing}]"
            )
        else:
            yield (
                f"static int {name}_{other}(struct {name} *{name[0]}, size_t {thing}) {{\n"
                f"    for (size_t i = {rng.randint(0, 9)}; i < {thing}; ++i) {{\n"
                f"        if ({name[0]}->{other}[i] != 0x{rng.randint(16, 255):x}) return -{limit};\n    }}\n"
                f"    {name[0]}->{thing} += {limit};  /* {_fill(rng, '{a} {n}')} */\n    return 0;\n}}"
            )


_ZH_WHO = "老师 邻居 医生 农民 学生 船长 画家 厨师 记者 工人 孩子 老人 商人 司机 木匠".split()
_ZH_WHEN = "清晨 傍晚 昨天 去年秋天 春天来临时 下雨的时候 天亮以前 节日那天 午后 每个周末".split()
_ZH_WHERE = "河边 市场里 山脚下 图书馆门口 院子里 车站旁 桥上 田野中 老街尽头 湖的对岸".split()
_ZH_DOES = "看书 修理机器 谈论天气 准备晚饭 写信 唱歌 种树 等待消息 整理行李 散步 画画 收拾工具".split()
_ZH_HOW = "慢慢地 认真地 高兴地 悄悄地 一个人 和朋友一起 不停地 耐心地".split()
_ZH_END = "，大家都觉得很平常|，心里十分平静|，后来谁也没有再提起|，这里的生活一直如此|，远处传来钟声|".split("|")


def _zh_sentence(rng: Random) -> str:
    parts = (_ZH_WHEN, _ZH_WHO, _ZH_WHERE, _ZH_HOW, _ZH_DOES, _ZH_END)
    when, who, where, how, does, end = (rng.choice(part) for part in parts)
    return rng.choice((f"{when}，{who}在{where}{how}{does}{end}。", f"{who}说，{when}要到{where}去{does}{end}。"))


@filler("chinese", "\n")
def _chinese(rng: Random) -> Iterator[str]:
    while True:
        yield "".join(_zh_sentence(rng) for _ in range(rng.randint(1, 4)))


@filler("soup")
def _soup(rng: Random) -> Iterator[str]:
    while True:
        yield " ".join(pseudo_word(rng) for _ in range(rng.randint(5, 15))) + rng.choice((".", ",", ";", " -"))


@filler("log", "\n")
def _log(rng: Random) -> Iterator[str]:
    clock = rng.randint(0, 80000)
    while True:
        clock = (clock + rng.randint(1, 40)) % 86400
        stamp = f"{clock // 3600:02d}:{clock // 60 % 60:02d}:{clock % 60:02d}.{rng.randint(0, 999):03d}"
        level = rng.choice(("INFO", "DEBUG", "WARN", "ERROR"))
        yield (
            f"2031-04-{rng.randint(1, 28):02d} {stamp} {level} [{rng.choice(NOUNS)}-{rng.randint(1, 16)}] request "
            f"/{rng.choice(VERBS)}/{rng.choice(NOUNS)} took {rng.randint(1, 900)} ms, {rng.randint(10, 9999)} bytes"
        )


@filler("table", "\n")
def _table(rng: Random) -> Iterator[str]:
    while True:
        cells = [rng.choice(NOUNS), rng.choice(ADJECTIVES), rng.randint(1, 9999), f"{rng.uniform(0, 100):.2f}"]
        yield "| " + " | ".join(str(cell) for cell in (*cells, rng.choice(VERBS))) + " |"
