"""The window: which past pages attention sees in one layer of one step. Pure.

`past` pages lie before the chunk's own pages, which are always seen (causally) and never part of what is chosen here.
Where everything fits in the pool the window is all of them: selection is the identity (invariant 4).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.kv.share import WindowBudget


@dataclass(frozen=True)
class Span:
    """Logical pages that are always seen: [0, sink), `kept` and [recent, past); the others are the candidates."""

    sink: int
    recent: int
    past: int
    kept: tuple[int, int] = (0, 0)  # [first, end), between sink and recent

    def eligible(self) -> np.ndarray:
        """bool [past]"""
        mask = np.zeros(self.past, dtype=bool)
        mask[self.sink : self.recent] = True
        mask[slice(*self.kept)] = False
        return mask

    def window(self, selected: np.ndarray) -> np.ndarray:
        """Logical pages in order: sink, kept and selected ones, recent. int64 [n]."""
        between = np.sort(np.concatenate([np.arange(*self.kept), selected])) if self.kept[1] else selected
        return np.concatenate([np.arange(self.sink), between, np.arange(self.recent, self.past)]).astype(np.int64)


def fits(past: int, own: int, pool: int) -> bool:
    """Everything is resident at once."""
    return past + own <= pool


def span(past: int, own: int, budget: WindowBudget, selection: int) -> Span:
    """What is always seen beside `own` pages of the chunk when `selection` pages are kept free for recall.

    A chunk longer than the recent share takes from it first and from the selection's share last.
    """
    sink = min(budget.sink, past)
    room = budget.pool - budget.free - sink - (budget.always - budget.sink) - own - selection
    first_recent = max(sink, past - max(1, min(budget.recent - 1, room)))
    first, end = (min(max(page, sink), first_recent) for page in budget.kept)
    return Span(sink, first_recent, past, (first, end) if first < end else (0, 0))
