"""Reading pages out of the pool on a CPU: two ways that give the same bytes.

`index_select` shares the copy among torch's threads and waits for them, which costs milliseconds on a busy machine;
`take` is numpy's, in one thread. Which is faster is the machine's to say: the route `page_gather`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # numpy has no bfloat16; a copy needs only the width


def as_words(data: Tensor) -> np.ndarray:
    """The same memory for numpy."""
    return data.view(_WIDTHS[data.dtype.itemsize]).numpy()


def gather_pages(data: Tensor, words: np.ndarray | None, slots: np.ndarray, schedule: str) -> Tensor:
    """data [slot, ...] and the same as words -> [n, ...], in the order of `slots`."""
    if schedule == "take" and words is not None:
        return torch.from_numpy(words.take(slots, 0)).view(data.dtype)
    return data.index_select(0, torch.from_numpy(slots).to(data.device))
