"""What each page would get of every query row's attention, from 4-bit key codes. Triton; reference: recall/score.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops import geometry as g
from engine.ops.geometry import Turns
from engine.ops.triton_attention import dot, load_turned_rows, turn

PAST, FARTHEST = map(tl.constexpr, (g.PAST, g.FARTHEST))
UNRANKED = tl.constexpr(2**30)


@triton.jit
def _codes(packed, SHIFT: tl.constexpr):
    """A nibble n as the bfloat16 128 + n: its bits stand in the mantissa."""
    return ((packed >> SHIFT) & 15 | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _page_lse(
    q,  # [T, HEADS, DIM]: the rows that are scored
    codes,  # uint8 [page, KV_HEADS, 64, DIM / 2] of one layer
    scales,  # float32 [page, KV_HEADS, 64]
    ids,  # int32 [logical page]
    geometry,
    cos,
    sin,
    lse,  # float32 [KV_HEADS, ROWS, pages], natural
    order,  # int32 [pages]: made ready for `_rank`
    rows,
    reach,
    scale,
    pages,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    kv_head = tl.program_id(1)
    past, farthest = tl.load(geometry + PAST), tl.load(geometry + FARTHEST)
    row, half, key = tl.arange(0, ROWS), tl.arange(0, HALF), tl.arange(0, PAGE)
    low, high = load_turned_rows(q, row, rows, kv_head, half, HEADS, HEADS // KV_HEADS, DIM)
    low, high = low * scale, high * scale
    inside = (half < DIM // 2)[:, None]
    for page in range(tl.program_id(0), past, tl.num_programs(0)):
        identity = tl.load(ids + page).to(tl.int64)
        a, b = turn(low, high, cos, sin, tl.minimum(past - page, farthest) + reach, half, DIM)
        a, b = a.to(tl.bfloat16), b.to(tl.bfloat16)
        at = (identity * KV_HEADS + kv_head) * PAGE
        packed = tl.load(codes + at * (DIM // 2) + key[None, :] * (DIM // 2) + half[:, None], mask=inside, other=0)
        size = tl.load(scales + at + key)
        packed = packed.to(tl.int16)
        scores = dot(a, _codes(packed, 0), tl.zeros([ROWS, PAGE], tl.float32))
        scores = dot(b, _codes(packed, 4), scores)
        centre = 136.0 * (tl.sum(a.to(tl.float32), 1) + tl.sum(b.to(tl.float32), 1))
        scores = (scores - centre[:, None]) * size[None, :]
        top = tl.max(scores, 1)
        mass = top + tl.log(tl.sum(tl.exp(scores - top[:, None]), 1))
        tl.store(lse + (kv_head * ROWS + row).to(tl.int64) * pages + page, mass, mask=row < rows)
        if kv_head == 0:
            tl.store(order + page, UNRANKED)


def page_lse(
    q: Tensor,
    codes: Tensor,
    scales: Tensor,
    ids: Tensor,
    geometry: Tensor,
    turns: Turns,
    scale: float,
    lse: Tensor,
    order: Tensor,
    units: int,
) -> None:
    """q [T, heads, dim] turned; fills lse [kv_head, rows, pages] for the past pages and clears their `order`."""
    tokens, heads, dim = q.shape
    kv_heads = codes.shape[1]
    _page_lse[(max(1, units // kv_heads), kv_heads)](
        q,
        codes,
        scales,
        ids,
        geometry,
        turns.cos,
        turns.sin,
        lse,
        order,
        tokens * (heads // kv_heads),
        turns.reach,
        scale,
        lse.shape[2],
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        PAGE=codes.shape[2],
        HALF=max(16, triton.next_power_of_2(dim // 2)),
        ROWS=lse.shape[1],
        num_warps=4,
        num_stages=3,
    )


def padded_rows(tokens: int, heads: int, kv_heads: int) -> int:
    """Rows of `lse` for so many scored tokens."""
    return max(16, triton.next_power_of_2(tokens * (heads // kv_heads)))


def make_lse(tokens: int, heads: int, kv_heads: int, pages: int, device: torch.device) -> Tensor:
    return torch.empty(kv_heads, padded_rows(tokens, heads, kv_heads), pages, dtype=torch.float32, device=device)
