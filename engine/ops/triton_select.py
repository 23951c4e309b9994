"""From scores to a window, on the device: ranks in each KV head, the best within the budget. Triton.

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
from engine.ops.triton_score import PageScores, scored_rows

PAST, LEFT, DEPTH = map(tl.constexpr, (g.PAST, g.LEFT, g.DEPTH))
CANDIDATE, TAKEN = map(tl.constexpr, (g.CANDIDATE, g.TAKEN))
UNSELECTED, KEY, LEXICAL, NEIGHBOR = map(tl.constexpr, (g.UNSELECTED, g.KEY, g.LEXICAL, g.NEIGHBOR))
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
    lse,  # float32 [far, PADDED, pages]
    top_part,  # float32 [far, PADDED, splits]
    sum_part,
    why,  # uint8 [pages]: of the step before
    role,  # uint8 [pages]
    keys,  # int32 [2, KV_HEADS, pages]: out, of all pages, and of those above the bar in any order
    listed,  # int32 [KV_HEADS]: raised by how many those are
    bars,  # int32 [KV_HEADS]
    order,  # int32 [pages]: out, made ready for `_rank`
    changed,  # int32 [1]: out, zero, for `_pick`
    geometry,
    pages,
    splits,
    hysteresis,
    worth,
    KV_HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
    GROUP: tl.constexpr,
    FOLLOW: tl.constexpr,
):
    """Integers that order pages as their share of attention does, the best over the rows; -1: may not be chosen.

    The lowest bits hold the page, so that no two are equal and the earlier page comes first.
    """
    head = tl.program_id(1)
    past, rows = tl.load(geometry + PAST), scored_rows(geometry, MOST, GROUP)
    page = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    await_results(FOLLOW)
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
            tl.store(changed, 0)
            tl.store(order + page, tl.where(held, UNRANKED - 1, UNRANKED), mask=page < past)
        top = tl.where(row < rows, tl.max(tops, 1), 0.0)
        total = tl.sum(sums * tl.exp(tops - top[:, None]), 1)
        total = top + tl.log(tl.where(row < rows, total, 1.0))
        share = tl.exp(tl.max(x - total[:, None], 0))
        share = tl.where(held, share * hysteresis + worth, share)
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
    head = tl.program_id(1)
    past, depth = tl.load(geometry + PAST), tl.load(geometry + DEPTH)
    await_results(FOLLOW)
    above = tl.load(listed + head)
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
    why,  # uint8 [pages]: of the step before; out
    chosen,  # int32 [pages]: out
    changed,  # int32 [1]: out, not 0 if these are other pages than in the step before
    geometry,
    KV_HEADS: tl.constexpr,
    NEIGHBORS: tl.constexpr,
    PLACES: tl.constexpr,
    OWN_: tl.constexpr,
    OTHERS: tl.constexpr,
    FOLLOW: tl.constexpr,
):
    past, left = tl.load(geometry + PAST), tl.load(geometry + LEFT)
    begin = tl.program_id(0) * OWN_
    await_results(FOLLOW)
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
        before = tl.load(why + own, mask=own < past, other=UNSELECTED)
        other = ((before == KEY) | (before == NEIGHBOR)) != picked
        if tl.sum(other.to(tl.int32), 0) > 0:
            tl.store(changed, 1)
        tl.store(why + own, reason.to(tl.uint8), mask=own < past)
        tl.store(chosen + place, own, mask=picked)


@dataclass(frozen=True)
class Choice:
    """What scores chose in one layer."""

    pages: Tensor  # int32 [most]: logical, the first LEFT count
    changed: Tensor  # int32 [1]: not 0 if they are others than in the step before
    redo: Tensor  # int32 [1]: not 0 if attention that began before they were known does not count

    @classmethod
    def empty(cls, most: int, device: torch.device) -> Choice:
        return cls(*(torch.zeros(size, dtype=torch.int32, device=device) for size in (most, 1, 1)))


def rank(
    scores: PageScores,
    bars: Tensor,
    why: Tensor,
    role: Tensor,
    choice: Choice,
    geometry: Tensor,
    hysteresis: float,
    worth: float,
) -> None:
    """Set `scores.order` to each candidate's best turn: its rank in a head x twice the heads, plus the head.

    Makes `choice` ready for `pick`.

    bars int32 [kv_head], in the places of `scores.far` heads: keys above which pages are looked at, -1 at first; moved
    to where twice as many as count pass.
    """
    kv_heads, padded, pages = scores.lse.shape
    far = scores.far
    rows = triton.next_power_of_2(scores.rows)
    block = 128 if rows <= 32 else 32
    _key[(triton.cdiv(pages, block), far)](
        scores.lse,
        scores.top,
        scores.sum,
        why,
        role,
        scores.keys,
        scores.listed,
        bars,
        scores.order,
        choice.changed,
        geometry,
        pages,
        scores.splits,
        hysteresis,
        worth,
        KV_HEADS=kv_heads,
        PADDED=padded,
        ROWS=rows,
        SPLITS=triton.next_power_of_2(scores.splits),
        PLACES=triton.next_power_of_2(pages),
        BLOCK=block,
        MOST=scores.most,
        GROUP=scores.heads // scores.kv_heads,
        num_warps=4 if rows <= 32 else 8,
        **follow(why),
    )
    _rank[(triton.cdiv(pages, RANK["OWN_"]), far)](
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


def pick(scores: PageScores, role: Tensor, why: Tensor, choice: Choice, geometry: Tensor, neighbors: int) -> None:
    """Set `choice` to the pages whose turns come first; `why` says how each came in."""
    pages = role.shape[0]
    _pick[(triton.cdiv(pages, PICK["OWN_"]),)](
        scores.order,
        role,
        why,
        choice.pages,
        choice.changed,
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
