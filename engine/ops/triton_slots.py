"""Which page lies in which slot, on the device: touch a window, find slots for its misses and for new pages. Triton.

A slot is given as `DevicePool.place` would, the reference: free ones first, then the least recently used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops import geometry as g
from engine.ops.follow import await_results, follow
from engine.ops.triton_select import Choice

WINDOW, LEFT, TICK, STEADY = map(tl.constexpr, (g.WINDOW, g.LEFT, g.TICK, g.STEADY))
FETCHED = tl.constexpr(g.FETCHED)
NEVER = tl.constexpr(2**31 - 1)
ALIGNED = 4
"""Kernels are compiled for addresses that are multiples of 16 bytes: rows of int32 begin so many apart."""
UNROLL = tl.constexpr(4)
"""Loads of a comparison that are under way together."""


@triton.jit
def _claim(slot_of, page_in, last_used, pinned, wanted, found, need, tick, slots, SLOTS: tl.constexpr):
    """Slots for the `need` pages `wanted`: free ones first, then the least recently used. `found`: scratch of SLOTS.

    One program. Reference: `DevicePool.place`.
    """
    LONGEST: tl.constexpr = 2**30 // SLOTS
    slot = tl.arange(0, SLOTS)
    held = tl.load(page_in + slot, mask=slot < slots, other=-1)
    used = tl.load(last_used + slot, mask=slot < slots, other=0)
    locked = tl.load(pinned + tl.maximum(held, 0), mask=(slot < slots) & (held >= 0), other=0) != 0
    idle = tl.where(held < 0, LONGEST + 1, tl.minimum(tick - used, LONGEST))
    order = slot - idle * SLOTS  # no two are equal
    order = tl.where((idle == 0) | locked | (slot >= slots), NEVER, order)
    tl.store(found + slot, order)
    tl.debug_barrier()
    STEP: tl.constexpr = 8 if SLOTS >= 8 else SLOTS  # more spills
    ahead = tl.zeros([SLOTS, STEP], tl.int32)
    for start in tl.range(0, SLOTS, STEP, loop_unroll_factor=UNROLL):
        other = tl.load(found + start + tl.arange(0, STEP))
        ahead += (other[None, :] < order[:, None]).to(tl.int32)
    before = tl.sum(ahead, 1)
    tl.debug_barrier()
    given = (before < need) & (order != NEVER)
    page = tl.load(wanted + before, mask=given, other=0)
    tl.store(slot_of + held, -1, mask=given & (held >= 0))
    tl.debug_barrier()
    tl.store(slot_of + page, slot, mask=given)
    tl.store(page_in + slot, page, mask=given)
    tl.store(last_used + slot, tick, mask=given)
    tl.store(found + before, slot, mask=given)


@triton.jit
def _bring(
    fixed,  # int32 [pages]: logical, those that are seen whatever scores choose
    chosen,  # int32 [pages]: logical, those that scores chose
    changed,  # int32 [1]: not 0 if those are others than in the step before
    restless,  # int32 [1]: `changed` of this layer's step before; out, of this one
    redo,  # int32 [1]: out, not 0 if attention did not begin early, or over another window
    window,  # int32 [slots]: both; out unless it holds them from the step before; in order where SORT
    ids,
    slot_of,  # int32 [page]
    page_in,  # int32 [slot]
    last_used,  # int32 [slot]
    pinned,  # uint8 [page]
    misses,  # int32 [slots]: out, page ids
    places,  # int32 [slots]: out, their slots
    missing,  # int32 [1]: out
    geometry,
    counters,
    slots,
    SORT: tl.constexpr,
    SLOTS: tl.constexpr,
    FOLLOW: tl.constexpr,
):
    count, tick, left = tl.load(geometry + WINDOW), tl.load(geometry + TICK), tl.load(geometry + LEFT)
    steady = tl.load(geometry + STEADY) != 0
    index = tl.arange(0, SLOTS)
    seen = index < count
    page = tl.load(window + index, mask=index < slots, other=0)  # beyond `count` too: not to wait for it
    page = tl.where(seen & steady, page, 0)
    identity = tl.load(ids + page, mask=seen, other=0)
    slot = tl.load(slot_of + identity, mask=seen, other=0)
    await_results(FOLLOW)
    other = tl.load(changed) != 0
    anew = other | (steady == 0)
    tl.store(redo, (anew | (tl.load(restless) != 0)).to(tl.int32))
    tl.store(restless, other.to(tl.int32))
    if anew:
        given = count - left
        page = tl.load(fixed + index, mask=index < given, other=0)
        page += tl.load(chosen + index - given, mask=seen & (index >= given), other=0)
        tl.store(window + index, page, mask=seen)
        if SORT:
            before = tl.zeros([SLOTS], tl.int32)
            tl.debug_barrier()
            for place in range(count):
                before += (tl.load(window + place) < page).to(tl.int32)
            tl.debug_barrier()
            tl.store(window + before, page, mask=seen)
        identity = tl.load(ids + page, mask=seen, other=0)
        slot = tl.load(slot_of + identity, mask=seen, other=0)
    tl.store(last_used + slot, tick, mask=seen & (slot >= 0))
    absent = (seen & (slot < 0)).to(tl.int32)
    need = tl.sum(absent, 0)
    tl.store(missing, need)
    if need > 0:
        tl.store(misses + tl.cumsum(absent, 0) - 1, identity, mask=absent != 0)
        tl.atomic_add(counters + FETCHED, need.to(tl.int64))
        tl.debug_barrier()
        _claim(slot_of, page_in, last_used, pinned, misses, places, need, tick, slots, SLOTS)


@triton.jit
def _open(
    fresh,  # int32 [n] page ids
    pool,  # [layer, slot, ...]
    slot_of,
    page_in,
    last_used,
    pinned,
    places,  # int32 [layer, slots]: scratch
    geometry,
    count,
    pages,
    slots,
    size,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    layer = tl.program_id(0)
    tick = tl.load(geometry + TICK)
    found = places + layer.to(tl.int64) * SLOTS
    _claim(
        slot_of + layer.to(tl.int64) * pages,
        page_in + layer * slots,
        last_used + layer * slots,
        pinned,
        fresh,
        found,
        count,
        tick,
        slots,
        SLOTS,
    )
    tl.debug_barrier()
    for i in range(count):
        slot = tl.load(found + i)
        base = pool + (layer.to(tl.int64) * slots + slot) * size
        for start in range(0, size, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(base + at, tl.zeros([BLOCK], pool.dtype.element_ty), mask=at < size)


@dataclass(frozen=True)
class Tables:
    """Which page is in which slot, one layer's rows or all layers': int32, except `pinned` uint8 [page]."""

    slot_of: Tensor  # [page]
    page_in: Tensor  # [slot]
    last_used: Tensor  # [slot]
    pinned: Tensor  # [page]

    def layer(self, index: int) -> Tables:
        return Tables(self.slot_of[index], self.page_in[index], self.last_used[index], self.pinned)


@dataclass(frozen=True)
class Misses:
    """What `bring` writes: the pages it had to find slots for, one layer's or all layers'."""

    told: Tensor  # int32 [FIRST + slots]: their number, from FIRST on their ids: one run, so one copy tells the host
    places: Tensor  # int32 [slots, rounded up to a power of two]: their slots

    FIRST: ClassVar[int] = ALIGNED

    @classmethod
    def empty(cls, layers: int, slots: int, device: torch.device) -> Misses:
        sizes = cls.FIRST + triton.cdiv(slots, cls.FIRST) * cls.FIRST, triton.next_power_of_2(slots)
        return cls(*(torch.zeros(layers, size, dtype=torch.int32, device=device) for size in sizes))

    @property
    def count(self) -> Tensor:
        """int32 [1]"""
        return self.told[..., :1]

    @property
    def pages(self) -> Tensor:
        """int32 [at least slots]: ids."""
        return self.told[..., self.FIRST :]

    def layer(self, index: int) -> Misses:
        return Misses(self.told[index], self.places[index])


def bring(
    fixed: Tensor,
    choice: Choice,
    restless: Tensor,
    window: Tensor,
    ids: Tensor,
    tables: Tables,
    misses: Misses,
    geometry: Tensor,
    counters: Tensor,
    sort: bool,
) -> None:
    """Set `window` to the fixed and the chosen pages, touch the resident ones of it and claim slots for the cold ones,
    whose bytes are still to be fetched. A window that holds these pages from the step before stays as it is.

    restless int32 [ALIGNED], its first: of the layer, whether its pages changed in the step before; what it says is
    renewed, and `choice.redo` says whether attention that began early counts.
    """
    slots = tables.page_in.shape[0]
    _bring[(1,)](
        fixed,
        choice.pages,
        choice.changed,
        restless,
        choice.redo,
        window,
        ids,
        tables.slot_of,
        tables.page_in,
        tables.last_used,
        tables.pinned,
        misses.pages,
        misses.places,
        misses.count,
        geometry,
        counters,
        slots,
        SORT=sort,
        SLOTS=misses.places.shape[0],
        num_warps=16,
        **follow(window),
    )


def open_pages(fresh: Tensor, pool: Tensor, tables: Tables, places: Tensor, geometry: Tensor) -> None:
    """Give `fresh` page ids (int32 [n]) zeroed slots in every layer. places: scratch int32 [layer, 2^k >= slots]."""
    layers, slots = tables.page_in.shape
    size = pool[0, 0].numel()
    _open[(layers,)](
        fresh,
        pool,
        tables.slot_of,
        tables.page_in,
        tables.last_used,
        tables.pinned,
        places,
        geometry,
        fresh.shape[0],
        tables.slot_of.shape[1],
        slots,
        size,
        SLOTS=places.shape[1],
        BLOCK=min(8192, triton.next_power_of_2(size)),
        num_warps=8,
    )
