"""One conversation's tokens and the pages that hold them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.config import PAGE
from engine.kv.tail import Tail


@dataclass
class Sequence:
    """`pages[i]` holds tokens 64 i .. 64 i + 63; the last may be open. `tags[i]`: how closed page i was computed."""

    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    tail: Tail | None = None  # of the layers that slide, if there are any and something was computed or resumed
    marks: set[int] = field(default_factory=set)  # tokens after which others may want to resume; each a page's end

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def closed(self) -> int:
        """Full pages."""
        return self.length // PAGE

    def ids(self, start: int = 0, end: int | None = None) -> np.ndarray:
        return np.asarray(self.pages[start:end], dtype=np.int64)
