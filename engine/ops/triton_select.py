"""From scores to a window, on the device: ranks in each KV head, the best within the budget, misses, victims. Triton.

The same choice as `recall.select.choose`, which is the reference: the heads take turns, a neighbour comes half a turn
after its page, a page that was selected before stays until another scores clearly better. Ranks are counted, not
sorted: `torch.topk` of 64 from 8 x 4,096 takes 33 us, too slow to run in every layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from engine.ops import geometry as g
from engine.ops.triton_score import UNRANKED

PAST, OWN, WINDOW, LEFT, DEPTH, TICK = map(tl.constexpr, (g.PAST, g.OWN, g.WINDOW, g.LEFT, g.DEPTH, g.TICK))
HIDDEN, CANDIDATE, TAKEN, ALWAYS = map(tl.constexpr, (g.HIDDEN, g.CANDIDATE, g.TAKEN, g.ALWAYS))
UNSELECTED, KEY, LEXICAL, NEIGHBOR = map(tl.constexpr, (g.UNSELECTED, g.KEY, g.LEXICAL, g.NEIGHBOR))
FETCHED = tl.constexpr(g.FETCHED)
NEVER = tl.constexpr(2**31 - 1)


@triton.jit
def _scores(lse, page, past, rows, pages, top, total, why, role, hysteresis, ROWS: tl.constexpr):
    """The share of attention of pages [n], the best over the rows; -1 for those that may not be chosen."""
    row = tl.arange(0, ROWS)
    x = tl.load(
        lse + row.to(tl.int64)[:, None] * pages + page[None, :],
        mask=(row < rows)[:, None] & (page < past)[None, :],
        other=float("-inf"),
    )
    share = tl.max(tl.exp(x - top[:, None]) / total[:, None], 0)
    held = tl.load(why + page, mask=page < past, other=0) != UNSELECTED
    kind = tl.load(role + page, mask=page < past, other=0)
    share = tl.where(held, share * hysteresis, share)
    return tl.where((kind == CANDIDATE) | (kind == TAKEN), share, -1.0)


@triton.jit
def _rank(
    lse,  # float32 [KV_HEADS, PADDED, pages]
    why,  # uint8 [pages]: of the step before
    role,  # uint8 [pages]
    order,  # int32 [pages]: lowered to the best turn of any head
    geometry,
    rows,
    pages,
    hysteresis,
    KV_HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tl.program_id(1)
    past, depth = tl.load(geometry + PAST), tl.load(geometry + DEPTH)
    block = tl.program_id(0) * BLOCK
    if block < past:
        lse += head.to(tl.int64) * PADDED * pages
        row = tl.arange(0, ROWS)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for start in range(0, past, BLOCK):
            page = start + tl.arange(0, BLOCK)
            x = tl.load(
                lse + row.to(tl.int64)[:, None] * pages + page[None, :],
                mask=(row < rows)[:, None] & (page < past)[None, :],
                other=float("-inf"),
            )
            higher = tl.maximum(top, tl.max(x, 1))
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp(top - safe) + tl.sum(tl.exp(x - safe[:, None]), 1)
            top = higher
        top = tl.where(row < rows, top, 0.0)
        total = tl.where(row < rows, total, 1.0)
        own = block + tl.arange(0, BLOCK)
        mine = _scores(lse, own, past, rows, pages, top, total, why, role, hysteresis, ROWS)
        before = tl.zeros([BLOCK], tl.int32)
        for start in range(0, past, BLOCK):
            page = start + tl.arange(0, BLOCK)
            other = _scores(lse, page, past, rows, pages, top, total, why, role, hysteresis, ROWS)
            ahead = (other[None, :] > mine[:, None]) | (
                (other[None, :] == mine[:, None]) & (page[None, :] < own[:, None])
            )
            before += tl.sum((ahead & (other >= 0)[None, :]).to(tl.int32), 1)
        counts = (mine >= 0) & (before < depth) & (own < past)
        tl.atomic_min(order + own, before * (2 * KV_HEADS) + head, mask=counts)


@triton.jit
def _claim(slot_of, page_in, last_used, pinned, wanted, found, need, tick, slots, SLOTS: tl.constexpr):
    """Slots for the `need` pages `wanted`: free ones first, then the least recently used. `found`: scratch of SLOTS.

    One program. Reference: `DevicePool.place`.
    """
    slot = tl.arange(0, SLOTS)
    held = tl.load(page_in + slot, mask=slot < slots, other=-1)
    used = tl.load(last_used + slot, mask=slot < slots, other=NEVER)
    age = tl.where(held < 0, -1, used)
    locked = tl.load(pinned + tl.maximum(held, 0), mask=(slot < slots) & (held >= 0), other=0) != 0
    age = tl.where((age == tick) | locked | (slot >= slots), NEVER, age)
    tl.store(found + slot, age)
    tl.debug_barrier()
    STEP: tl.constexpr = 64 if SLOTS >= 64 else SLOTS
    before = tl.zeros([SLOTS], tl.int32)
    for start in range(0, SLOTS, STEP):
        index = start + tl.arange(0, STEP)
        other = tl.load(found + index)
        ahead = (other[None, :] < age[:, None]) | ((other[None, :] == age[:, None]) & (index[None, :] < slot[:, None]))
        before += tl.sum(ahead.to(tl.int32), 1)
    tl.debug_barrier()
    given = (before < need) & (age != NEVER)
    page = tl.load(wanted + before, mask=given, other=0)
    tl.store(slot_of + held, -1, mask=given & (held >= 0))
    tl.debug_barrier()
    tl.store(slot_of + page, slot, mask=given)
    tl.store(page_in + slot, page, mask=given)
    tl.store(last_used + slot, tick, mask=given)
    tl.store(found + before, slot, mask=given)


@triton.jit
def _plan(
    order,  # int32 [pages]
    role,
    why,  # uint8 [pages]: out
    ids,
    slot_of,  # int32 [page]
    page_in,  # int32 [slot]
    last_used,  # int32 [slot]
    pinned,  # uint8 [page]
    window,  # int32 [pages]: out, ascending
    misses,  # int32 [slots]: out, page ids
    places,  # int32 [slots]: out, their slots
    missing,  # int32 [1]: out
    geometry,
    counters,
    slots,
    KV_HEADS: tl.constexpr,
    NEIGHBORS: tl.constexpr,
    SCORED: tl.constexpr,
    PAGES: tl.constexpr,
    BINS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    past, left, tick = tl.load(geometry + PAST), tl.load(geometry + LEFT), tl.load(geometry + TICK)
    page = tl.arange(0, PAGES)
    kind = tl.load(role + page, mask=page < past, other=0)
    reason = tl.where(kind == TAKEN, LEXICAL, UNSELECTED)
    chosen = kind == TAKEN
    if SCORED:
        turn = tl.load(order + page, mask=page < past, other=UNRANKED)
        alone = turn
        for distance in tl.static_range(1, NEIGHBORS + 1):
            beside = tl.load(order + page - distance, mask=(page >= distance) & (page < past), other=UNRANKED)
            turn = tl.minimum(turn, beside + KV_HEADS)
            beside = tl.load(order + page + distance, mask=page + distance < past, other=UNRANKED)
            turn = tl.minimum(turn, beside + KV_HEADS)
        turn = tl.where((kind == CANDIDATE) & (turn < UNRANKED), tl.minimum(turn, BINS - 1), BINS - 1)
        counts = tl.histogram(turn, BINS)
        reached = tl.cumsum(counts, 0)
        bins = tl.arange(0, BINS)
        last = tl.min(tl.where((reached >= left) & (bins < BINS - 1), bins, BINS - 1), 0)
        sure = tl.sum(tl.where(bins < last, counts, 0), 0)
        edge = (turn == last) & (turn < BINS - 1)
        picked = (turn < last) | (edge & (tl.cumsum(edge.to(tl.int32), 0) <= left - sure))
        reason = tl.where(picked, tl.where(turn < alone, NEIGHBOR, KEY), reason)
        chosen = chosen | picked
    tl.store(why + page, reason.to(tl.uint8), mask=page < past)

    seen = (chosen | (kind == ALWAYS)) & (page < past)
    tl.store(window + tl.cumsum(seen.to(tl.int32), 0) - 1, page, mask=seen)
    identity = tl.load(ids + page, mask=seen, other=0)
    slot = tl.load(slot_of + identity, mask=seen, other=0)
    tl.store(last_used + slot, tick, mask=seen & (slot >= 0))
    absent = seen & (slot < 0)
    need = tl.sum(absent.to(tl.int32), 0)
    tl.store(misses + tl.cumsum(absent.to(tl.int32), 0) - 1, identity, mask=absent)
    tl.store(missing, need)
    if need > 0:
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


def rank(lse: Tensor, why: Tensor, role: Tensor, order: Tensor, geometry: Tensor, rows: int, hysteresis: float) -> None:
    """Lower `order` [pages], cleared before, to each candidate's best turn: rank in a head x 2 heads + the head."""
    kv_heads, padded, pages = lse.shape
    block = 64 if padded > 32 else 128
    _rank[(triton.cdiv(pages, block), kv_heads)](
        lse,
        why,
        role,
        order,
        geometry,
        rows,
        pages,
        hysteresis,
        KV_HEADS=kv_heads,
        PADDED=padded,
        ROWS=max(2, triton.next_power_of_2(rows)),
        BLOCK=block,
        num_warps=8,
    )


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
class Plan:
    """What `plan` writes: the window, and the pages it had to find slots for."""

    window: Tensor  # int32 [pages]
    misses: Tensor  # int32 [slots]
    places: Tensor  # int32 [slots, rounded up to a power of two]
    missing: Tensor  # int32 [1]


def plan(
    order: Tensor,
    role: Tensor,
    why: Tensor,
    ids: Tensor,
    tables: Tables,
    out: Plan,
    geometry: Tensor,
    counters: Tensor,
    kv_heads: int,
    neighbors: int,
    most: int,
    scored: bool,
) -> None:
    """The window of one layer; claims slots for its cold pages, whose bytes are still to be fetched.

    most: the largest budget that may be asked for; scored: whether `order` holds turns.
    """
    pages, slots = role.shape[0], tables.page_in.shape[0]
    _plan[(1,)](
        order,
        role,
        why,
        ids,
        tables.slot_of,
        tables.page_in,
        tables.last_used,
        tables.pinned,
        out.window,
        out.misses,
        out.places,
        out.missing,
        geometry,
        counters,
        slots,
        KV_HEADS=kv_heads,
        NEIGHBORS=neighbors,
        SCORED=scored,
        PAGES=triton.next_power_of_2(pages),
        BINS=triton.next_power_of_2(2 * kv_heads * max(1, most) + 1),
        SLOTS=triton.next_power_of_2(slots),
        num_warps=16 if pages > 1024 else 8,
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
