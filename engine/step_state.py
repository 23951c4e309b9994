"""What a step is told, and what it counts: in the same places in every step, so that a captured graph serves them all.

The host writes into pinned memory, and the launches themselves copy that to the device and the counters back. So it
must not write for the next step before the one under way has read its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.ops import geometry as g


class StepState:
    """`geometry` int32 [GEOMETRY] and `counters` int64 [COUNTERS]: on the device, as kernels read and write them."""

    def __init__(self, device: torch.device, most: int) -> None:
        """most: tokens of a step."""
        pin = device.type == "cuda"
        self.geometry = torch.zeros(g.GEOMETRY, dtype=torch.int32, device=device)
        self.counters = torch.zeros(g.COUNTERS, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self._geometry_in = torch.zeros(g.GEOMETRY, dtype=torch.int32, pin_memory=pin)
        self._words = self._geometry_in.numpy()
        self._tokens_in = torch.zeros(most, dtype=torch.int64, pin_memory=pin)
        self._counters_out = torch.zeros(g.COUNTERS, dtype=torch.int64, pin_memory=pin)
        self._counted = np.zeros(g.COUNTERS, dtype=np.int64)
        self._done: torch.cuda.Event | None = None

    def tell(self, tokens: Sequence[int], words: dict[int, int]) -> None:
        """words: by their place in `geometry`."""
        self._wait()
        self._words[list(words)] = list(words.values())
        self._tokens_in.numpy()[: len(tokens)] = tokens

    def send(self, rows: int) -> Tensor:
        """Launch the copy of what was told; `rows` tokens, int64, on the device: those told, then any."""
        self.geometry.copy_(self._geometry_in, non_blocking=True)
        return self._tokens[:rows].copy_(self._tokens_in[:rows], non_blocking=True)

    def fetch(self) -> None:
        """Launch the copy of what was counted."""
        self._counters_out.copy_(self.counters, non_blocking=True)

    def launched(self) -> None:
        """All of the step's launches are made."""
        if self.counters.is_cuda:
            self._done = self._done or torch.cuda.Event()
            self._done.record()

    def counted(self) -> list[int]:
        """By place in `counters`: what came to it since this was asked last, once the step is done."""
        self._wait()
        now = self._counters_out.numpy()
        more = (now - self._counted).tolist()
        self._counted = now.copy()
        return more

    def _wait(self) -> None:
        if self._done is not None:
            self._done.synchronize()
