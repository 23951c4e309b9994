"""Copies between the tiers: write-through when a page closes, fetch when recall or an exact pass wants it back.

On CUDA the write-through runs on a side stream. Until it has been waited for, the page stays pinned in the pool
(invariant 5) and is no replica (invariant 6).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.kv.host import HostStore
from engine.kv.pool import DevicePool


@dataclass
class TransferStats:
    """Since the engine started, or of one request. Seconds are those that the caller waited."""

    pages_stored: int = 0
    layer_pages_fetched: int = 0
    layer_pages_streamed: int = 0
    bytes_fetched: int = 0
    fetch_seconds: float = 0.0

    def add(self, now: TransferStats, before: TransferStats) -> None:
        """What was counted between two states of other stats."""
        if now != before:
            for name, value in vars(now).items():
                setattr(self, name, getattr(self, name) + value - getattr(before, name))


@dataclass
class Transfer:
    """Between one pool and one store."""

    pool: DevicePool
    host: HostStore
    stats: TransferStats = field(default_factory=TransferStats)
    store_kernel: Callable[[torch.Tensor, np.ndarray], None] | None = None
    """Copies pages [n] from slots [layer, n] to pinned host memory, on the current stream."""

    def __post_init__(self) -> None:
        self._cuda = self.pool.data.is_cuda
        self._stream = torch.cuda.Stream(self.pool.data.device) if self._cuda else None
        self._in_flight: list[tuple[list[int], torch.cuda.Event]] = []

    def write_through(self, pages: list[int], slots: torch.Tensor | None = None) -> None:
        """Copy closed pages, resident in every layer, to the host. Complete on return except on CUDA (`settle`).

        slots int64 [layer, n] on the device: the tables need not come home for it.
        """
        if not pages:
            return
        ids = np.asarray(pages)
        if self._cuda:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                if slots is not None and self.store_kernel is not None:
                    self.store_kernel(slots, ids)
                    slots.record_stream(self._stream)
                else:
                    self._copy_each(pages, slots.tolist() if slots is not None else self.pool.slot_of[:, ids].tolist())
                event = torch.cuda.Event()
                event.record()
            self._in_flight.append((pages, event))
        else:
            index = torch.from_numpy(ids)
            for layer in range(self.host.shape.layers):
                self.host.data[:, layer].index_copy_(0, index, self.pool.read(layer, ids))
            self._complete(pages)

    def _copy_each(self, pages: list[int], slots: list[list[int]]) -> None:
        for layer, places in enumerate(slots):
            for page, slot in zip(pages, places, strict=True):
                self.host.data[page, layer].copy_(self.pool.data[layer, slot], non_blocking=True)

    def settle(self, wait: bool = False) -> None:
        """Seal the copies that have finished; with `wait`, all of them."""
        while self._in_flight and (wait or self._in_flight[0][1].query()):
            pages, event = self._in_flight.pop(0)
            event.synchronize()
            self._complete(pages)

    def _complete(self, pages: list[int]) -> None:
        held = [page for page in pages if self.host.references[page] > 0]
        if held:
            self.host.seal(held, self.pool.read)
        self.pool.pinned[pages] = False
        self.stats.pages_stored += len(held)

    @property
    def in_flight(self) -> list[int]:
        return [page for pages, _ in self._in_flight for page in pages]

    def place(self, layer: int, pages: np.ndarray) -> np.ndarray:
        """`DevicePool.place`; where pages whose copies are under way stand in the way, they are waited for."""
        if self._in_flight and self.pool.reusable(layer) < len(pages):
            self.settle(wait=True)
        return self.pool.place(layer, pages)

    def fetch(self, layer: int, pages: np.ndarray) -> None:
        """Give these pages slots in `layer` and bring their bytes back from the host."""
        if len(pages) == 0:
            return
        began = time.perf_counter()
        slots = self.place(layer, pages)
        try:
            index = torch.from_numpy(slots).to(self.pool.data.device)
            self.pool.data[layer].index_copy_(0, index, self.load(layer, pages))
            if self.host.verifies:
                for page, slot in zip(pages.tolist(), slots.tolist(), strict=True):
                    self.host.check(layer, page, self.pool.data[layer, slot])
        except BaseException:
            self.pool.slot_of[layer, pages] = -1  # a slot that was not filled holds nothing
            self.pool.page_in[layer, slots] = -1
            raise
        self.stats.layer_pages_fetched += len(pages)
        self.stats.bytes_fetched += len(pages) * self.host.shape.layer_page_bytes
        self.stats.fetch_seconds += time.perf_counter() - began

    def load(self, layer: int, pages: np.ndarray) -> torch.Tensor:
        """[n, *layer_page] as stored, on the pool's device, straight from the host; a view where one run serves."""
        if self._in_flight and not self.host.replica[pages].all():
            self.settle(wait=True)
        first, count = int(pages[0]), len(pages)
        if count == 1 or (np.diff(pages) == 1).all():
            source = self.host.data[first : first + count, layer]
        else:
            source = self.host.data[:, layer].index_select(0, torch.from_numpy(pages.astype(np.int64)))
        return source.to(self.pool.data.device)

    def stage(self, layer: int, pages: np.ndarray) -> torch.Tensor:
        """One segment of an exact pass: resident pages from the pool, cold ones from the host; the pool stays put.

        Where the device is the host, stored pages are read where they lie: a view, if their ids are one run.
        """
        resident = self.pool.resident(layer, pages)
        if resident.all():
            return self.pool.read(layer, pages)
        began = time.perf_counter()
        if not self._cuda and not self.host.verifies and self.host.replica[pages].all():
            cold = len(pages) - int(resident.sum())
            self.stats.layer_pages_streamed += cold
            self.stats.bytes_fetched += cold * self.host.shape.layer_page_bytes
            loaded = self.load(layer, pages)
            self.stats.fetch_seconds += time.perf_counter() - began
            return loaded
        cold = pages[~resident]
        loaded = self.load(layer, cold)
        if self.host.verifies:
            for page, copy in zip(cold.tolist(), loaded, strict=True):
                self.host.check(layer, page, copy)
        self.stats.layer_pages_streamed += len(cold)
        self.stats.bytes_fetched += len(cold) * self.host.shape.layer_page_bytes
        if resident.any():
            device = self.pool.data.device
            segment = loaded.new_empty((len(pages), *loaded.shape[1:]))
            segment.index_copy_(0, torch.from_numpy(np.flatnonzero(~resident)).to(device), loaded)
            segment.index_copy_(
                0, torch.from_numpy(np.flatnonzero(resident)).to(device), self.pool.read(layer, pages[resident])
            )
            loaded = segment
        self.stats.fetch_seconds += time.perf_counter() - began
        return loaded
