"""Misses that the host brings: where kernels can't read its store in place, through a small pinned staging area.

The device tells which pages a layer misses, the host lays copies of them side by side, and the kernel that follows
moves these into their slots. Per layer that costs one wait, one copy of each page, and no launch beside the gather.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from engine.kv.host import HostStore
from engine.kv.pool import DevicePool
from engine.kv.transfer import TransferStats
from engine.ops import triton_moves
from engine.ops.gather import as_words
from engine.ops.triton_slots import Misses
from engine.units import MIB

STAGING = 16 * MIB
"""Pinned memory for copies: 64 pages of 256 KiB, where a decode step misses a few in a layer."""


class Ferry:
    """Between one store and one pool, a layer at a time.

    One staging area serves every layer: the wait for a layer's misses is also one for the gather of the layer before.
    """

    def __init__(self, pool: DevicePool, host: HostStore, misses: Misses, stats: TransferStats, units: int) -> None:
        """misses: of all layers, as `triton_slots.bring` writes them; units: programs of the gather."""
        self._pool, self._misses, self._stats, self._units = pool, misses, stats, units
        self._cuda, device = pool.data.is_cuda, pool.data.device
        self._room = min(pool.slots, max(1, STAGING // pool.shape.layer_page_bytes))
        size = (self._room, *pool.shape.layer_page)
        self._staged = torch.empty(size, dtype=pool.data.dtype, pin_memory=self._cuda)
        self._told = torch.zeros(misses.told.shape[1], dtype=torch.int32, pin_memory=self._cuda)
        self._count = torch.zeros(1, dtype=torch.int32, pin_memory=self._cuda)  # of pages that are staged
        self._order = torch.arange(self._room, dtype=torch.int32, device=device)
        self._from, self._to = as_words(host.data), as_words(self._staged)
        self._missed, self._ready = self._told.numpy(), self._count.numpy()

    def fetch(self, layer: int, between: Callable[[Callable[[], None]], None]) -> None:
        """Launch what fills the slots of this layer's misses.

        `between` is given the host's work, to be done each time after what was launched so far and before the rest.
        """
        self._told.copy_(self._misses.told[layer], non_blocking=True)
        between(lambda: self._load(layer))
        self._gather(layer, 0)

    def _load(self, layer: int) -> None:
        """Stage the first misses for the gather that follows; those beyond the room go to their slots before."""
        self._wait()
        count = int(self._missed[0])
        self._ready[0] = 0
        if not count:
            return
        began = time.perf_counter()
        pages = self._missed[Misses.FIRST : Misses.FIRST + count].tolist()
        for first in reversed(range(0, count, self._room)):
            part = pages[first : first + self._room]
            self._copy(layer, part)
            self._ready[0] = len(part)
            if first:
                self._gather(layer, first)
                self._wait()
        self._stats.fetch_seconds += time.perf_counter() - began

    def _copy(self, layer: int, pages: list[int]) -> None:
        """In this thread: 97 us for three pages of 256 KiB on an H200's host, where sharing them took 127 to 249."""
        for place, page in enumerate(pages):
            self._to[place] = self._from[page, layer]

    def _gather(self, layer: int, first: int) -> None:
        places = self._misses.places[layer, first:]
        triton_moves.gather(self._staged, self._pool.data[layer], self._order, places, self._count, self._units)

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.current_stream().synchronize()
