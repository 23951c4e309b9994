"""Filler as tokens, for training: slices of the corpora, synthetic kinds, small vocabularies, repeats, random ids."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from gates.filler import ADJECTIVES, ADVERBS, NOUNS, VERBS

Ids = np.ndarray  # uint16, one dimension
KINDS = {"english": 0.15, "chinese": 0.12, "code": 0.09, "other": 0.08}
KINDS |= {"synthetic": 0.22, "small": 0.14, "repeat": 0.12, "random": 0.08, "numeric": 0.14}


class Text:
    """The tokenizer, with what sampling asks of it again and again."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.size = self.tokenizer.get_vocab_size()
        pieces = [self.tokenizer.id_to_token(i) for i in range(self.size)]
        ends = ("Ċ", ".", "!", "?", "ãĢĤ", "ï¼ģ", "ï¼Ł")  # the byte-level spelling of line and sentence ends
        self.ends = np.array([piece.endswith(ends) for piece in pieces])
        self.line_ends = np.array([piece.endswith("Ċ") for piece in pieces])
        self.words = [self(f" {word}") for word in NOUNS + ADJECTIVES + VERBS + ADVERBS]

    def __call__(self, text: str) -> Ids:
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.uint16)

    @lru_cache(maxsize=20_000)  # noqa: B019 (one Text lives as long as its process)
    def fixed(self, text: str) -> Ids:
        return self(text)


class Fill:
    """Draws filler of any length. `arrays` are prepare.py's; nothing is mutated after construction."""

    def __init__(self, folder: Path, text: Text) -> None:
        self.text = text
        self.digits, self.space = text("0123456789"), text.fixed(" ")
        with np.load(folder / "corpus.npz") as arrays:
            loaded = {name: arrays[name] for name in arrays.files}
        self.corpora = {name: ids for name, ids in loaded.items() if ids.ndim == 1}
        self.synthetic = [ids for ids in loaded.values() if ids.ndim == 2]
        self.names, weights = list(KINDS), np.array(list(KINDS.values()))
        self.weights = weights / weights.sum()

    def draw(self, rng: np.random.Generator, length: int) -> Ids:
        """`length` tokens, of one kind two times in three, else of several."""
        if length <= 0:
            return np.zeros(0, np.uint16)
        parts = 1 if rng.random() < 0.67 else int(rng.integers(2, 6))
        cuts = np.sort(rng.integers(0, length + 1, parts - 1))
        sizes = np.diff(np.concatenate(([0], cuts, [length])))
        return np.concatenate([self._one(rng, int(size)) for size in sizes])

    def _one(self, rng: np.random.Generator, length: int) -> Ids:
        if not length:
            return np.zeros(0, np.uint16)
        kind = self.names[rng.choice(len(self.names), p=self.weights)]
        if kind in self.corpora:
            return self._slice(rng, self.corpora[kind], length)
        return getattr(self, f"_{kind}")(rng, length)

    @staticmethod
    def _slice(rng: np.random.Generator, source: Ids, length: int) -> Ids:
        start = int(rng.integers(0, max(1, len(source) - length)))
        return np.resize(source[start : start + length], length)

    def _synthetic(self, rng: np.random.Generator, length: int) -> Ids:
        """Streams of one kind, one after another: a long one has seen several vocabularies."""
        streams = self.synthetic[rng.integers(len(self.synthetic))]
        order = rng.permutation(len(streams))
        size = streams.shape[1]
        if length <= size:
            return self._slice(rng, streams[order[0]], length)
        return np.resize(streams[order[: -(-length // size)]].ravel(), length)

    def _small(self, rng: np.random.Generator, length: int) -> Ids:
        """Sentences over 2 to 64 words, or over as many random tokens."""
        size = int(2 ** rng.uniform(1, 6))
        if rng.random() < 0.6:
            words = [self.text.words[i] for i in rng.integers(0, len(self.text.words), size)]
        else:
            words = [rng.integers(3, self.text.size, int(n)).astype(np.uint16) for n in rng.integers(1, 4, size)]
        stop = self.text.fixed(rng.choice([".", "。", "\n", ".\n", ";"]))
        rows = [words[i] for i in rng.integers(0, size, min(length, 6000))]
        step = int(rng.integers(4, 16))
        for index in range(step, len(rows), step):
            rows[index] = stop
        return np.resize(np.concatenate(rows), length)

    def _numeric(self, rng: np.random.Generator, length: int) -> Ids:
        """Words of a small vocabulary and numbers, in lines of one or several fixed shapes or of none."""
        size, glue = (
            int(2 ** rng.uniform(2, 6)),
            [self.text.fixed(sign) for sign in rng.choice(list(" :-./,;=()[]#"), 4)],
        )
        words = [self.text.words[i] for i in rng.integers(0, len(self.text.words), size)]
        stop = self.text.fixed(rng.choice([".", "\n", "\n", ".\n"]))
        shapes = [rng.integers(0, 3, int(rng.integers(3, 14))) for _ in range(int(rng.integers(1, 5)))]
        shaped, rows = rng.random() < 0.7, []
        for _ in range(min(length // 8, 2500) + 1):
            shape = shapes[rng.integers(len(shapes))] if shaped else rng.integers(0, 3, int(rng.integers(3, 14)))
            for part in shape:
                if part == 0:
                    rows.append(words[rng.integers(size)])
                elif part == 1:
                    digits = self.digits[rng.integers(0, 10, int(rng.integers(1, 7)))]
                    rows.append(digits if rng.random() < 0.5 else np.concatenate((self.space, digits)))
                else:
                    rows.append(glue[rng.integers(len(glue))])
            rows.append(stop)
        return np.resize(np.concatenate(rows), length)

    def _repeat(self, rng: np.random.Generator, length: int) -> Ids:
        """One unit of 2 to 80 tokens, again and again; from a corpus, a template or of random tokens."""
        size = int(2 ** rng.uniform(1, 6.3))
        draw = rng.random()
        if draw < 0.4:
            unit = self._slice(rng, self.corpora[rng.choice(list(self.corpora))], size)
        elif draw < 0.85:
            unit = self._sentence(rng)
        else:
            unit = rng.integers(3, self.text.size, size).astype(np.uint16)
        return np.resize(unit, length)

    def _sentence(self, rng: np.random.Generator) -> Ids:
        source = self._synthetic(rng, 160)
        ends = np.flatnonzero(self.text.ends[source])
        return source[ends[0] + 1 : ends[1] + 1] if len(ends) > 1 and ends[1] > ends[0] + 2 else source[:20]

    def _random(self, rng: np.random.Generator, length: int) -> Ids:
        return rng.integers(3, self.text.size, length).astype(np.uint16)
