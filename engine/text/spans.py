"""Token ids with the characters that each covers, and the last long pieces of text in that form.

A conversation is sent again with each of its turns: what was tokenised for the turn before need not be again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

LONG = 2000
"""Characters from which a piece is worth keeping: shorter ones are tokenised in a fraction of a millisecond."""
MOST_TOKENS = 1 << 20
"""Kept at most, 12 bytes each; the pieces longest unused go first."""


@dataclass(frozen=True)
class Spans:
    """int32 each: ids, and the characters [start, end) of each. Shared: not to be written to."""

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, ids: Iterable[int], offsets: Iterable[tuple[int, int]]) -> Spans:
        ids = np.asarray(ids, dtype=np.int32)
        return cls(ids, *np.asarray(offsets, dtype=np.int32).reshape(len(ids), 2).T)

    def moved(self, characters: int) -> Spans:
        """The same, so many characters later in the text."""
        return Spans(self.ids, self.starts + characters, self.ends + characters)

    @classmethod
    def joined(cls, parts: list[Spans]) -> Spans:
        """One after the other, each at the characters that it says."""
        columns = zip(*((part.ids, part.starts, part.ends) for part in parts), strict=True)
        return cls(*map(np.concatenate, columns)) if parts else cls.of([], [])


class Kept:
    """Pieces by their text. Safe from several threads."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most, self._tokens, self._turn = most_tokens, 0, threading.Lock()
        self._pieces: OrderedDict[str, Spans] = OrderedDict()

    def get(self, text: str, make: Callable[[str], Spans]) -> Spans:
        """The piece, made if it isn't kept."""
        if len(text) < LONG:
            return make(text)
        with self._turn:
            found = self._pieces.get(text)
            if found is not None:
                self._pieces.move_to_end(text)
                return found
        made = make(text)
        with self._turn:
            if text not in self._pieces:
                self._pieces[text] = made
                self._tokens += len(made.ids)
            while self._tokens > self._most:
                self._tokens -= len(self._pieces.popitem(last=False)[1].ids)
        return made
