"""From scores to a window, on the device: ranks in each KV head, the best within the budget, misses, victims. Triton.

The choice of `recall.select.choose`, the reference: the heads take turns, a neighbour comes half a turn after its page,
a page that was selected before stays until another scores clearly better. Ranks are counted, not sorted: `torch.topk`
of 64 from 8 x 4,096 takes 33 us, too slow to run in every layer. Scores are compared to 2^-11 or so, since the page's
number takes the lowest bits of what is compared. Only pages above a bar are compared with each other, as long as those
are all that can count: twice as many passed it in the step before. So ranks cost the same however many pages there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops import geometry as g
from engine.ops.follow import await_results, follow
from engine.ops.triton_score import PageScores

PAST, WINDOW, LEFT, DEPTH, TICK = map(tl.constexpr, (g.PAST, g.WINDOW, g.LEFT, g.DEPTH, g.TICK))
CANDIDATE, TAKEN = map(tl.constexpr, (g.CANDIDATE, g.TAKEN))
UNSELECTED, KEY, LEXICAL, NEIGHBOR = map(tl.constexpr, (g.UNSELECTED, g.KEY, g.LEXICAL, g.NEIGHBOR))
FETCHED = tl.constexpr(g.FETCHED)
NEVER = tl.constexpr(2**31 - 1)
NO_TURN = tl.constexpr(2**29)
UNRANKED = tl.constexpr(2**30 + 1)
"""In `order`: never its turn, nor was it selected before."""
RANK, PICK = {"OWN_": 32, "OTHERS": 128, "num_warps": 4}, {"OWN_": 16, "OTHERS": 256, "num_warps": 8}
"""Pages whose ranks one program counts, and those that they are compared with at once, the fastest on an H200: larger
squares take registers, and fewer programs run side by side."""
UNROLL = tl.constexpr(4)
"""Squares whose loads are under way together: one after the other, most of a program's time is their latency."""


@triton.jit
def _key(
    lse,  # float32 [KV_HEADS, PADDED, pages]
    top_part,  # float32 [KV_HEADS, PADDED, splits]
    sum_part,
    why,  # uint8 [pages]: of the step before
    role,  # uint8 [pages]
    keys,  # int32 [2, KV_HEADS, pages]: out, of all pages, and of those above the bar in any order
    listed,  # int32 [KV_HEADS]: raised by how many those are
    bars,  # int32 [KV_HEADS]
    order,  # int32 [pages]: out, made ready for `_rank`
    geometry,
    rows,
    pages,
    splits,
    hysteresis,
    KV_HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
    FOLLOW: tl.constexpr,
):
    """Integers that order pages as their share of attention does, the best over the rows; -1: may not be chosen.

    The lowest bits hold the page, so that no two are equal and the earlier page comes first.
    """
    await_results(FOLLOW)
    head = tl.program_id(1)
    past = tl.load(geometry + PAST)
    page = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(0) * BLOCK < past:
        row, split = tl.arange(0, ROWS), tl.arange(0, SPLITS)
        part = (head * PADDED + row)[:, None] * splits + split[None, :]
        inside = (row < rows)[:, None] & (split < splits)[None, :]
        tops = tl.load(top_part + part, mask=inside, other=float("-inf"))
        sums = tl.load(sum_part + part, mask=inside, other=0.0)
        at = (head * PADDED + row).to(tl.int64)[:, None] * pages + page[None, :]
        x = tl.load(lse + at, mask=(row < rows)[:, None] & (page < past)[None, :], other=float("-inf"))
        held = tl.load(why + page, mask=page < past, other=0) != UNSELECTED
        kind = tl.load(role + page, mask=page < past, other=0)
        bar = tl.load(bars + head)
        if head == 0:
            tl.store(order + page, tl.where(held, UNRANKED - 1, UNRANKED), mask=page < past)
        top = tl.where(row < rows, tl.max(tops, 1), 0.0)
        total = tl.sum(sums * tl.exp(tops - top[:, None]), 1)
        total = top + tl.log(tl.where(row < rows, total, 1.0))
        share = tl.exp(tl.max(x - total[:, None], 0))
        share = tl.where(held, share * hysteresis, share)
        key = (share.to(tl.int32, bitcast=True) & -PLACES) | (PLACES - 1 - page)
        key = tl.where((kind == CANDIDATE) | (kind == TAKEN), key, -1)
        tl.store(keys + head * pages + page, key, mask=page < past)
        above = (key > bar) & (page < past)
        count = above.to(tl.int32)
        place = tl.atomic_add(listed + head, tl.sum(count, 0)) + tl.cumsum(count, 0) - 1
        tl.store(keys + (KV_HEADS + head) * pages + place, key, mask=above)


@triton.jit
def _rank(
    keys,
    listed,
    bars,  # int32 [KV_HEADS]: out, for the step after
    why,
    order,  # int32 [pages]: lowered to twice the best turn of any head, plus 1 if the page was not selected before
    geometry,
    pages,
    KV_HEADS: tl.constexpr,
    PLACES: tl.constexpr,
    OWN_: tl.constexpr,
    OTHERS: tl.constexpr,
    FOLLOW: tl.constexpr,
):
    await_results(FOLLOW)
    head = tl.program_id(1)
    past, depth, above = tl.load(geometry + PAST), tl.load(geometry + DEPTH), tl.load(listed + head)
    enough = above >= depth
    count = tl.where(enough, above, past)
    begin = tl.program_id(0) * OWN_
    if begin < count:
        mine_of = keys + (tl.where(enough, KV_HEADS, 0) + head) * pages
        own = begin + tl.arange(0, OWN_)
        mine = tl.load(mine_of + own, mask=own < count, other=-1)
        page = PLACES - 1 - (mine & (PLACES - 1))
        fresh = tl.load(why + page, mask=mine >= 0, other=0) == UNSELECTED
        ahead = tl.zeros([OWN_, OTHERS], tl.int32)
        for start in tl.range(0, count, OTHERS, loop_unroll_factor=UNROLL):
            place = start + tl.arange(0, OTHERS)
            other = tl.load(mine_of + place, mask=place < count, other=-1)
            ahead += (other[None, :] > mine[:, None]).to(tl.int32)
        before = tl.sum(ahead, 1)
        turn = before * (2 * KV_HEADS) + head
        tl.atomic_min(order + page, turn * 2 + fresh.to(tl.int32), mask=(mine >= 0) & (before < depth))
        tl.store(bars + head + before * 0, mine, mask=(mine >= 0) & (before == 2 * depth - 1))


@triton.jit
def _beside(order, page, held, mask, KV_HEADS: tl.constexpr):
    """The turn that `page` gives its neighbour: when it comes in itself, or if the neighbour was there before."""
    source = tl.load(order + page, mask=mask, other=UNRANKED)
    return tl.where(((source & 1) == 1) | held, (source >> 1) + KV_HEADS, NO_TURN)


@triton.jit
def _turns(order, role, page, past, KV_HEADS: tl.constexpr, NEIGHBORS: tl.constexpr, PLACES: tl.constexpr):
    """When each page's turn is, distinct for each page (NEVER: not at all); whether as a neighbour; its role."""
    own = tl.load(order + page, mask=page < past, other=UNRANKED)
    alone, held = own >> 1, (own & 1) == 0
    turn = alone
    for distance in tl.static_range(1, NEIGHBORS + 1):
        turn = tl.minimum(turn, _beside(order, page - distance, held, (page >= distance) & (page < past), KV_HEADS))
        turn = tl.minimum(turn, _beside(order, page + distance, held, page + distance < past, KV_HEADS))
    kind = tl.load(role + page, mask=page < past, other=0)
    return tl.where((kind == CANDIDATE) & (turn < NO_TURN), turn * PLACES + page, NEVER), turn < alone, kind


@triton.jit
def _pick(
    order,
    role,
    why,  # uint8 [pages]: out
    window,  # int32 [pages]: out, after the pages that the host put there
    geometry,
    KV_HEADS: tl.constexpr,
    NEIGHBORS: tl.constexpr,
    PLACES: tl.constexpr,
    OWN_: tl.constexpr,
    OTHERS: tl.constexpr,
    FOLLOW: tl.constexpr,
):
    await_results(FOLLOW)
    past, left = tl.load(geometry + PAST), tl.load(geometry + LEFT)
    begin = tl.program_id(0) * OWN_
    if begin < past:
        own = begin + tl.arange(0, OWN_)
        mine, beside, kind = _turns(order, role, own, past, KV_HEADS, NEIGHBORS, PLACES)
        ahead = tl.zeros([OWN_, OTHERS], tl.int32)
        for start in tl.range(0, past, OTHERS, loop_unroll_factor=UNROLL):
            other, _, _ = _turns(order, role, start + tl.arange(0, OTHERS), past, KV_HEADS, NEIGHBORS, PLACES)
            ahead += (other[None, :] < mine[:, None]).to(tl.int32)
        place = tl.sum(ahead, 1)
        picked = (mine != NEVER) & (place < left)
        reason = tl.where(kind == TAKEN, LEXICAL, tl.where(picked, tl.where(beside, NEIGHBOR, KEY), UNSELECTED))
        tl.store(why + own, reason.to(tl.uint8), mask=own < past)
        tl.store(window + tl.load(geometry + WINDOW) - left + place, own, mask=picked)


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
    window,  # int32 [pages]: logical; put in order where SORT
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
    await_results(FOLLOW)
    count, tick = tl.load(geometry + WINDOW), tl.load(geometry + TICK)
    index = tl.arange(0, SLOTS)
    seen = index < count
    page = tl.load(window + index, mask=index < slots, other=0)  # beyond `count` too: not to wait for it
    page = tl.where(seen, page, 0)
    if SORT:
        before = tl.zeros([SLOTS], tl.int32)
        for other in range(count):
            before += (tl.load(window + other) < page).to(tl.int32)
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


def rank(scores: PageScores, bars: Tensor, why: Tensor, role: Tensor, geometry: Tensor, hysteresis: float) -> None:
    """Set `scores.order` to each candidate's best turn: its rank in a head x twice the heads, plus the head.

    bars int32 [kv_head]: keys above which pages are looked at, -1 at first; moved to where twice as many as count pass.
    """
    kv_heads, padded, pages = scores.lse.shape
    rows = triton.next_power_of_2(scores.rows)
    block = 128 if rows <= 32 else 32
    _key[(triton.cdiv(pages, block), kv_heads)](
        scores.lse,
        scores.top,
        scores.sum,
        why,
        role,
        scores.keys,
        scores.listed,
        bars,
        scores.order,
        geometry,
        scores.rows,
        pages,
        scores.splits,
        hysteresis,
        KV_HEADS=kv_heads,
        PADDED=padded,
        ROWS=rows,
        SPLITS=triton.next_power_of_2(scores.splits),
        PLACES=triton.next_power_of_2(pages),
        BLOCK=block,
        num_warps=4 if rows <= 32 else 8,
        **follow(why),
    )
    _rank[(triton.cdiv(pages, RANK["OWN_"]), kv_heads)](
        scores.keys,
        scores.listed,
        bars,
        why,
        scores.order,
        geometry,
        pages,
        KV_HEADS=kv_heads,
        PLACES=triton.next_power_of_2(pages),
        **RANK,
        **follow(why),
    )


def pick(scores: PageScores, role: Tensor, why: Tensor, window: Tensor, geometry: Tensor, neighbors: int) -> None:
    """The pages whose turns come first, behind those that already stand in `window`; `why` says how each came in."""
    pages = role.shape[0]
    _pick[(triton.cdiv(pages, PICK["OWN_"]),)](
        scores.order,
        role,
        why,
        window,
        geometry,
        KV_HEADS=scores.kv_heads,
        NEIGHBORS=neighbors,
        PLACES=triton.next_power_of_2(pages),
        **PICK,
        **follow(why),
    )


def most_ranks(kv_heads: int, pages: int) -> int:
    """The largest `DEPTH` whose turns still fit beside the page in 31 bits."""
    return (2**31 - 1) // triton.next_power_of_2(pages) // (2 * kv_heads) - 1


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

    pages: Tensor  # int32 [slots]: ids
    places: Tensor  # int32 [slots, rounded up to a power of two]: their slots
    count: Tensor  # int32 [1]

    @classmethod
    def empty(cls, layers: int, slots: int, device: torch.device) -> Misses:
        sizes = (slots, triton.next_power_of_2(slots), 1)
        return cls(*(torch.zeros(layers, size, dtype=torch.int32, device=device) for size in sizes))

    def layer(self, index: int) -> Misses:
        return Misses(self.pages[index], self.places[index], self.count[index])


def bring(
    window: Tensor, ids: Tensor, tables: Tables, misses: Misses, geometry: Tensor, counters: Tensor, sort: bool
) -> None:
    """Touch the window's resident pages and claim slots for the cold ones, whose bytes are still to be fetched."""
    slots = tables.page_in.shape[0]
    _bring[(1,)](
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
