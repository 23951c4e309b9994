"""What kernels read of a step: one small int32 vector on the device, so that a captured graph serves every step.

Words as in `engine/step.py`; all are pages unless named otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.config import PAGE
from engine.ops.rope import Rotary

STAGED_PAGES = 256
"""Pages of one of the two staging parts that large chunks stream through on a card: 16,384 keys, where cuDNN runs at
its full rate and merging costs a twentieth."""

PAST, FIRST, OWN, WINDOW, LEFT, DEPTH, FARTHEST, TICK, STEADY, TOKENS = range(10)
"""pages before the chunk's own; tokens that the first own page held; own pages; past pages in the window; pages that
scores may choose; ranks that count in a KV head; the largest distance scored with; the clock of last use; whether the
windows of the step before are this step's, should scores choose the same pages; tokens of the step: further rows count
for nothing"""
TAIL, TAIL_ROOM, TAIL_AT, POSITION = 10, 12, 13, 14
"""For layers that slide: the address of the sequence's tail, two words; tokens that it has room for; tokens in it
before the step's; the first one's true position"""
GEOMETRY = 15


def vector(words: dict[int, int]) -> np.ndarray:
    """int32 [GEOMETRY] of what is told, by place; zeros beside it."""
    told = np.zeros(GEOMETRY, dtype=np.int32)
    told[list(words)] = list(words.values())
    return told


FETCHED, STREAMED = range(2)
"""Layer pages brought into the pool, and read in place, since the start."""
COUNTERS = 2

HIDDEN, CANDIDATE, TAKEN, ALWAYS = range(4)
"""What a past page may be in a step: never seen, chosen by score, chosen before scores are looked at, always seen."""

UNSELECTED, KEY, LEXICAL, NEIGHBOR = range(4)
"""Why a page is selected: one more than its place in `recall.select.REASONS`."""


@dataclass(frozen=True)
class Turns:
    """Rotations by whole pages, float32 [2 * reach + 1, head_dim / 2]: row `reach + n` is a distance of n pages."""

    cos: Tensor
    sin: Tensor
    reach: int

    @classmethod
    def of(cls, rope: Rotary, reach: int) -> Turns:
        pages = torch.arange(-reach, reach + 1, device=rope.inv_freq.device)
        return cls(*(part.contiguous() for part in rope.cos_sin(pages * PAGE)), reach)
