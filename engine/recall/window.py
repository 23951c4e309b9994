"""The window: which past pages attention sees in one layer of one step. Pure.

`past` pages lie before the chunk's own pages, which are always seen (causally) and never part of what is chosen here.
Where everything fits in the pool the window is all of them: selection is the identity (invariant 4).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.kv.budget import WindowBudget


@dataclass(frozen=True)
class Span:
    """Logical pages that are always seen: [0, sink) and [recent, past); those between are the candidates."""

    sink: int
    recent: int
    past: int

    @property
    def candidates(self) -> int:
        return self.recent - self.sink

    def eligible(self) -> np.ndarray:
        """bool [past]"""
        mask = np.zeros(self.past, dtype=bool)
        mask[self.sink : self.recent] = True
        return mask

    def window(self, selected: np.ndarray) -> np.ndarray:
        """Logical pages in order: sink, selected, recent. int64 [n]."""
        return np.concatenate([np.arange(self.sink), selected, np.arange(self.recent, self.past)]).astype(np.int64)


def fits(past: int, own: int, pool: int) -> bool:
    """Everything is resident at once."""
    return past + own <= pool


def span(past: int, own: int, budget: WindowBudget, selection: int) -> Span:
    """What is always seen beside `own` pages of the chunk when `selection` pages are kept free for recall.

    A chunk longer than the recent share takes from it first and from the selection's share last.
    """
    sink = min(budget.sink, past)
    room = budget.pool - budget.free - sink - own - selection
    recent = max(1, min(budget.recent - 1, room))
    return Span(sink, max(sink, past - recent), past)
