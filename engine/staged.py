"""Exact attention of a large chunk: what it sees streams through a staging part, segment by segment.

While one segment is computed the next is laid out by another stream, from the pool where a page is resident and from
host memory where it is cold; during a layer's last segment and its matrix products that is the next layer's first.
Slots don't change while a chunk is computed, so only the own pages must wait for their layer: they come last. Partial
results merge by their log-sum-exp, in an order that depends on what is seen and not on where it lay.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from engine.config import PAGE
from engine.kv.pool import DevicePool
from engine.kv.transfer import Transfer
from engine.ops import cuda_flash, triton_moves, triton_pages
from engine.ops import geometry as g
from engine.ops.geometry import STAGED_PAGES as SEGMENT
from engine.ops.geometry import Turns
from engine.ops.rope import Rotary
from engine.ops.triton_layers import merge_into
from engine.ops.upload import upload

UNITS = 128
COLD_UNITS = 16
"""Programs that lay out a segment with cold pages: enough for PCIe, few beside the attention that runs meanwhile.
Twelve were slower: an exact prefill of 131K tokens at 9,765 tok/s against 9,962 (H200)."""


class Stager:
    """Two staging buffers and the stream that fills them, for one ring."""

    def __init__(self, pool: DevicePool, transfer: Transfer, rope: Rotary, heads: int, pages: int) -> None:
        """pages: the most that one sequence may have."""
        self.pool, self.transfer, self.rope = pool, transfer, rope
        shape, device = pool.shape, pool.data.device
        size = (2, shape.kv_heads * SEGMENT * PAGE * shape.head_dim)
        self.keys, self.values = (torch.empty(size, dtype=shape.dtype, device=device) for _ in range(2))
        self.turns = Turns.of(rope, pages + SEGMENT)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.free = [torch.cuda.Event() for _ in range(2)] if self.stream else []
        probe = torch.zeros(PAGE, heads, shape.head_dim, dtype=shape.dtype, device=device)
        keys = torch.zeros(shape.kv_heads, PAGE, shape.head_dim, dtype=shape.dtype, device=device)
        self.kernel = cuda_flash.choose(probe, keys, keys)

    @property
    def in_place(self) -> bool:
        return self.stream is None or self.transfer.host.pinned_bytes == self.transfer.host.bytes

    def upload(self, array: np.ndarray) -> Tensor:
        """int64, to the device."""
        return upload(np.asarray(array, dtype=np.int64), self.keys.device)


@dataclass(frozen=True)
class Segment:
    """A run of staged keys and values [kv_head, n * 64, dim]; `ready` when they are there."""

    keys: Tensor
    values: Tensor
    buffer: int
    ready: torch.cuda.Event | None


class StagedChunk:
    """One chunk over one list of past pages, layer by layer."""

    def __init__(
        self, stager: Stager, past: int, ids: np.ndarray, window: np.ndarray, first_row: int, tokens: int
    ) -> None:
        """past: pages before the chunk's own; ids int64: of the whole sequence, the own ones placed in every layer;
        window: logical past pages that are seen, ascending; first_row: tokens that the first own page holds already.
        """
        self.stager, self.past, self.first_row, self.tokens = stager, past, first_row, tokens
        pool = stager.pool
        seen = np.concatenate([window, np.arange(past, len(ids))])
        self.own = len(ids) - past
        slots = pool.slot_of[:, ids[seen]]
        self.streamed = int((slots < 0).sum())
        self._host_ids = ids[seen]
        self._cold = slots < 0
        self._slots, self._ids = stager.upload(slots), stager.upload(ids[seen])
        self._distance = stager.upload(past - seen)
        self._own_slots = self._slots[:, len(window) :].int()
        self._own_ids = stager.upload(np.arange(self.own)).int()
        geometry = g.vector({g.FIRST: first_row, g.OWN: self.own, g.TOKENS: tokens})
        self._geometry = upload(geometry, pool.data.device)
        self._offsets = stager.rope.cos_sin(torch.arange(first_row + tokens, device=pool.data.device))
        count = len(window)
        borders = [*range(0, count, SEGMENT), count]
        self._parts = [*list(pairwise(borders))[::-1], (count, count + self.own)]  # the own pages last
        self._ahead: Segment | None = None
        self._count = count
        self._turned: Tensor | None = None
        self._used = 0
        if stager.stream is not None:
            stager.stream.wait_stream(torch.cuda.current_stream())  # what earlier chunks appended is there

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the chunk's k and v, and attend: shapes as in `model.transformer.Attend`."""
        stager, scale = self.stager, self.stager.rope.score_scale
        if self._turned is None:
            self._turned = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        pool = stager.pool.data[layer]
        triton_pages.append(
            q,
            k,
            v,
            self._turned,
            pool,
            self._own_slots[layer],
            self._own_ids,
            self._geometry,
            self._offsets,
            stager.pool.shape.form.layout,
        )
        out, lse = None, None
        for part in self._parts:
            segment = self._ahead or self._stage(layer, *part)
            self._ahead = self._stage_next(layer, part)
            if segment.ready is not None:
                torch.cuda.current_stream().wait_event(segment.ready)
            pieces = self._own_pieces(segment) if part == self._parts[-1] else [(segment.keys, segment.values, False)]
            for keys, values, causal in pieces:
                more, more_lse = stager.kernel(self._turned, keys, values, causal, scale)
                if out is None:
                    out, lse = more.float().contiguous(), more_lse.contiguous().clone()
                else:
                    merge_into(out, lse, more, more_lse)
            if segment.ready is not None:
                stager.free[segment.buffer].record()
        return out.to(q.dtype)

    def _stage_next(self, layer: int, part: tuple[int, int]) -> Segment | None:
        """Begin with what is attended to after `part`: the layer's next part, or the next layer's first past one."""
        index = self._parts.index(part) + 1
        if index < len(self._parts):
            return self._stage(layer, *self._parts[index])
        if layer + 1 < self.stager.pool.shape.layers and len(self._parts) > 1:
            return self._stage(layer + 1, *self._parts[0])
        return None

    def _own_pieces(self, segment: Segment) -> list[tuple[Tensor, Tensor, bool]]:
        """Own keys that stood there before the chunk are seen by all its rows, the chunk's own causally."""
        first, end = self.first_row, self.first_row + self.tokens
        pieces = [(segment.keys[:, first:end], segment.values[:, first:end], True)]
        if first:
            pieces.append((segment.keys[:, :first], segment.values[:, :first], False))
        return pieces

    def _stage(self, layer: int, begin: int, end: int) -> Segment:
        stager = self.stager
        buffer, self._used = self._used % 2, self._used + 1
        shape = stager.pool.shape
        size = shape.kv_heads * (end - begin) * PAGE * shape.head_dim
        keys, values = (
            part[buffer, :size].view(shape.kv_heads, (end - begin) * PAGE, shape.head_dim)
            for part in (stager.keys, stager.values)
        )
        cold = self._cold[layer, begin:end]
        if stager.stream is None:
            self._lay_out(layer, begin, end, cold, keys, values)
            return Segment(keys, values, buffer, None)
        stager.stream.wait_event(stager.free[buffer])
        if begin == self._count:
            stager.stream.wait_stream(torch.cuda.current_stream())  # the own keys have just been appended
        with torch.cuda.stream(stager.stream):
            self._lay_out(layer, begin, end, cold, keys, values)
            ready = torch.cuda.Event()
            ready.record()
        return Segment(keys, values, buffer, ready)

    def _lay_out(self, layer: int, begin: int, end: int, cold: np.ndarray, keys: Tensor, values: Tensor) -> None:
        stager = self.stager
        host, ids = stager.transfer.host.data[:, layer], self._ids[begin:end]
        if not stager.in_place:  # no kernel may be given what it can't reach, even if it would not read it
            host = stager.pool.data[layer]
            if cold.any():
                host = stager.transfer.load(layer, self._host_ids[begin:end][cold])
                ids = stager.upload(np.cumsum(cold) - 1)
        triton_moves.stage(
            stager.pool.data[layer],
            host,
            self._slots[layer, begin:end],
            ids,
            self._distance[begin:end],
            stager.turns,
            keys,
            values,
            COLD_UNITS if cold.any() else UNITS,
            stager.pool.shape.form.layout,
        )
