"""Training sequences: conversations over documents with facts, cut to an exact length, and repeats of random tokens.

A sequence is one conversation in the chat form: a document, questions, answers; later turns bring further text and
facts, and text may stand between a question and its answer. `kinds` says what a token is to the loss: 0 nothing,
TEXT language modelling, VALUE an answer, REPEAT a token of a repeat.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np

from gates.facts import Fact
from gates.phantom.ask import draw
from gates.phantom.fill import Fill, Ids, Text

TEXT, VALUE, REPEAT = 1, 2, 3
START, END = 1, 2
TASK_WEIGHTS = {"keyed": 0.30, "disjoint": 0.22, "lines": 0.38, "codes": 0.10}
FARTHEST = 262_144


@dataclass(frozen=True)
class Mix:
    """What a stage trains on: the share of repeats and of skipped positions, and the tasks' weights."""

    length: int
    repeats: float = 0.0
    skips: float = 0.0
    tasks: tuple[float, ...] = tuple(TASK_WEIGHTS.values())
    between: float = 0.35  # share with text between questions and answers


@dataclass(frozen=True)
class Sequence:
    ids: np.ndarray  # [length] uint16
    kinds: np.ndarray  # [length] uint8
    tail: int  # tokens after the document, its first question included


class Sampler:
    """Draws sequences; all state is in the two generators, seeded by `seed`."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.text = Text(folder)
        self.fill = Fill(folder, self.text)
        self.rng, self.py = np.random.default_rng(seed), Random(seed)
        self.roles = {
            role: np.concatenate(([START], self.text(f"{role}\n"))) for role in ("system", "user", "assistant")
        }
        self.close = np.concatenate(([END], self.text("\n")))
        self.gap = np.tile(self.text("\n"), 2)

    def batch(self, mix: Mix, size: int) -> dict[str, np.ndarray | int]:
        """ids, positions (int32) and kinds (uint8), [size, length], and the longest tail."""
        rows = [
            self.repeated(mix.length) if self.rng.random() < mix.repeats else self.conversation(mix)
            for _ in range(size)
        ]
        positions = np.stack([self.positions(mix) for _ in rows])
        return {
            "ids": np.stack([row.ids for row in rows]).astype(np.int32),
            "positions": positions,
            "kinds": np.stack([row.kinds for row in rows]),
            "tail": max(row.tail for row in rows),
        }

    def positions(self, mix: Mix) -> np.ndarray:
        """0, 1, 2, ..., or with up to four jumps ahead, so that far positions are seen in short sequences."""
        steps = np.ones(mix.length, np.int64)
        steps[0] = 0
        if self.rng.random() < mix.skips:
            room = FARTHEST - mix.length
            jumps = self.rng.integers(1, 5)
            total = int(room * self.rng.random() ** 1.5)
            shares = self.rng.dirichlet(np.ones(jumps))
            steps[self.rng.integers(1, mix.length, jumps)] += (shares * total).astype(np.int64)
        return np.cumsum(steps).astype(np.int32)

    def repeated(self, length: int) -> Sequence:
        size = int(self.rng.integers(16, min(200, length // 2)))
        run = self.rng.integers(3, self.text.size, size)
        ids = np.resize(run, length).astype(np.uint16)
        kinds = np.full(length, REPEAT, np.uint8)
        kinds[: size + 1] = 0
        return Sequence(ids, kinds, length)

    # --- conversations ----------------------------------------------------------------------

    def conversation(self, mix: Mix) -> Sequence:
        for shrink in (1.0, 0.6, 0.35, 0.2, 0.1, 0.05):
            built = self._conversation(mix, shrink)
            if built is not None:
                return built
        raise ValueError(f"no conversation fits {mix.length} tokens")

    def _facts(self, mix: Mix, room: int) -> list[Fact]:
        """Facts of one task, or of two, that take at most `room` tokens, about."""
        taken: set[str] = set()
        task = self.py.choices(list(TASK_WEIGHTS), mix.tasks)[0]
        tasks = [task] if self.py.random() < 0.7 else [task, self.py.choice([t for t in TASK_WEIGHTS if t != task])]
        out: list[Fact] = []
        for name in tasks:
            share = room // len(tasks)
            if name == "lines":
                count = max(2, int(min(420, share // 14) * self.py.random() ** 0.5))
            else:
                count = self.py.randint(1, max(1, min(24, share // 24)))
            out += draw(self.py, name, count, taken)
        return out

    def _conversation(self, mix: Mix, shrink: float) -> Sequence | None:
        length, rng = mix.length, self.rng
        stated = self._facts(mix, int(0.8 * shrink * length))
        most = max(1, min(24, int(length**0.5 / 6), len(stated)))
        number = max(1, round(most * rng.random() ** 0.5 * min(1, 2 * shrink)))
        asked = self.py.sample(stated, min(number, len(stated)))
        if len(asked) > 2 and rng.random() < 0.1:
            asked[-1] = asked[0]
        late = asked[-1] if len(asked) > 2 and asked.count(asked[-1]) == 1 and rng.random() < 0.2 else None
        text_between = shrink > 0.5 and length >= 512 and rng.random() < mix.between
        layout = rng.random()
        head = self.roles["system" if layout < 0.15 else "user"]
        parts: list[tuple[np.ndarray, int]] = []  # what follows the document, with its kind
        if layout < 0.15:
            parts += [(self.close, TEXT), (self.roles["user"], TEXT)]
        elif layout < 0.3:
            reply = self.text.fixed(self.py.choice(["OK.", "Thank you.", "I have read it.", "Yes."]))
            parts += [(self.close, TEXT), (self.roles["assistant"], TEXT), (reply, TEXT), (self.close, TEXT)]
            parts += [(self.roles["user"], TEXT)]
        else:
            parts += [(self.gap, TEXT)]
        for index, fact in enumerate(asked):
            if index:
                parts += [(self.roles["user"], TEXT)]
                if late is not None and index == len(asked) // 2:
                    parts += [(self._document([late], int(rng.integers(20, 120))), TEXT), (self.gap, TEXT)]
                elif text_between and rng.random() < 0.3:
                    parts += [(self._aside(length, []), TEXT), (self.gap, TEXT)]
            parts += [(self.text.fixed(fact.question), TEXT)]
            if text_between and rng.random() < 0.5:
                parts += [(self.gap, TEXT), (self._aside(length, self._others(stated, fact)), TEXT)]
            value = self.text(fact.expected)
            parts += [(self.close, TEXT), (self.roles["assistant"], TEXT), (value, VALUE), (self.close[:1], VALUE)]
            parts += [(self.close[1:], TEXT)]
        tail = sum(len(ids) for ids, _ in parts)
        room = length - len(head) - tail
        document = self._document([fact for fact in stated if fact is not late], room, exact=True)
        if document is None:
            return None
        ids = np.concatenate([head, document, *(ids for ids, _ in parts)])
        kinds = np.full(length, TEXT, np.uint8)
        at = length - tail
        for piece, kind in parts:
            kinds[at : at + len(piece)] = kind
            at += len(piece)
        kinds[0] = 0
        return Sequence(ids.astype(np.uint16), kinds, tail)

    def _aside(self, length: int, repeated: list[Fact]) -> Ids:
        """Text between: 4 to 1,500 tokens, at most a sixth of the sequence; it may say facts again."""
        most = min(1500, length // 6)
        return self._document(repeated, int(most * self.rng.random() ** 1.2) + 4)

    def _others(self, stated: list[Fact], fact: Fact) -> list[Fact]:
        """Now and then a few facts that aren't asked for: the nearest fact need not be the right one."""
        others = [other for other in stated if other is not fact]
        if self.rng.random() < 0.6 or not others:
            return []
        return self.py.sample(others, min(len(others), self.py.randint(1, 3)))

    def _document(self, stated: list[Fact], room: int, exact: bool = False) -> Ids | None:
        """Filler with the facts at sentence ends: `room` tokens in all if `exact` (None if none fit), else filler."""
        rng, lined = self.rng, self.rng.random() < 0.35
        spaced = [self.text(f" {fact.text}") for fact in stated]
        sizes = sum(map(len, spaced)) + 2 * len(stated)
        if exact and room < sizes:
            return None
        filler = self.fill.draw(rng, room)
        low, high = (0.0, 1.0) if rng.random() < 0.6 else np.sort(rng.random(2))
        spots = np.sort((low + (high - low) * rng.random(len(stated))) * len(filler)).astype(int)
        if rng.random() < 0.5 and len(stated) > 1:
            spots = np.linspace(low * len(filler), high * len(filler), len(stated)).astype(int)
        ends = np.flatnonzero(self.text.ends[filler]) + 1
        out, last = [], 0
        for fact, plain, spot in zip(stated, spaced, spots, strict=True):
            near = int(np.searchsorted(ends, spot))
            if near < len(ends) and ends[near] - spot < 80:
                spot = int(ends[near])
            spot = max(spot, last)
            out.append(filler[last:spot])
            before = out[-1][-1] if spot > last else (out[-2][-1] if len(out) > 1 else 0)
            if lined or self.text.line_ends[before]:
                plain = self.text((("" if self.text.line_ends[before] else "\n") + fact.text) + "\n")
            out.append(plain)
            last = spot
        out.append(filler[last:])
        document = np.concatenate(out)
        return self._trim(document, out, room) if exact else document

    def _trim(self, document: Ids, pieces: list[Ids], room: int) -> Ids | None:
        """Take the surplus out of the filler pieces (even places), the longest first."""
        surplus = len(document) - room
        order = sorted(range(0, len(pieces), 2), key=lambda index: -len(pieces[index]))
        for index in order:
            if surplus <= 0:
                break
            cut = min(surplus, len(pieces[index]))
            if len(pieces[index]) > 3 * surplus:
                start = int(self.rng.integers(0, len(pieces[index]) - cut))
                pieces[index] = np.delete(pieces[index], slice(start, start + cut))
            else:
                pieces[index] = pieces[index][cut:]
            surplus -= cut
        if surplus > 0:
            return None
        return np.concatenate(pieces)
