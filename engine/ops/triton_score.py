"""What each page would get of every query row's attention, from 4-bit key codes. Triton; reference: recall/score.py.

Few rows, as of one token: products of 8-bit integers. Nibbles become bytes four at a time, and the turned query is
rounded to a byte a channel, which errs less than the codes do. One warp a program, keys as the rows of the product: a
page of one KV head is a small piece of work, and many of them at once hide the latency of each. Many rows, as of a
question: the page's keys are turned instead of the rows, once for all of them, in float16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops import geometry as g
from engine.ops.follow import await_results, follow
from engine.ops.geometry import Turns
from engine.ops.triton_attention import INTERPRETED, dot, load_turned_rows, turn

PAST, FARTHEST, TOKENS = map(tl.constexpr, (g.PAST, g.FARTHEST, g.TOKENS))
WARPS, MANY_WARPS = 1, 8
FEW = 8
"""Rows up to which they are turned to each page, and not its keys to them."""
MOST_SPLITS = 512
"""Parts of one row's sum: `triton_select` reads all of them in every program."""
MANY_ROWS = 128
"""Rows of a program, at most."""
MANY_UNITS = 2
"""Programs a multiprocessor for many rows: each has eight warps of work, and little room beside it."""
ROUND = tl.constexpr(12582912.0)
"""1.5 x 2^23: the lowest byte of a float32 to which it is added is the nearest integer."""
NIBBLE = tl.constexpr(16.0)
"""How much larger than a code a byte is whose upper half is the code."""
LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


@triton.jit
def _low(packed):
    """16 x the codes in the lower nibbles, which are stored 8 higher."""
    if INTERPRETED:
        return ((packed.to(tl.int32) & 15) * 16 - 128).to(tl.int8)
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; shl.b32 t, $1, 4; and.b32 t, t, 0xF0F0F0F0; xor.b32 $0, t, 0x80808080; }",
        "=r,r",
        [packed],
        dtype=tl.int8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _high(packed):
    if INTERPRETED:
        return ((packed.to(tl.int32) >> 4) * 16 - 128).to(tl.int8)
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; and.b32 t, $1, 0xF0F0F0F0; xor.b32 $0, t, 0x80808080; }",
        "=r,r",
        [packed],
        dtype=tl.int8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _byte(x):
    return (x + ROUND).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def scored_rows(geometry, MOST: tl.constexpr, GROUP: tl.constexpr):
    """Of one KV head."""
    return tl.minimum(tl.load(geometry + TOKENS), MOST) * GROUP


@triton.jit
def _page_lse(
    q,  # [T, HEADS, DIM]: of as many as the geometry says, the last MOST are scored
    codes,  # uint8 [far, page, 64, DIM / 2] of one layer
    scales,  # float32 [far, page, 64]
    heads,  # int32 [far]: KV heads
    ids,  # int32 [logical page]
    geometry,
    cos,
    sin,
    lse,  # float32 [far, PADDED, pages], natural: out
    top_part,  # float32 [far, PADDED, splits]: out, the largest lse of each split
    sum_part,  # the same: out, its sum of exp(lse - largest)
    listed,  # int32 [far]: out, zero, for `rank`
    reach,
    scale,
    pages,
    code_pages,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    MOST: tl.constexpr,
    FOLLOW: tl.constexpr,
):
    split, far, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    past, farthest, kv_head = tl.load(geometry + PAST), tl.load(geometry + FARTHEST), tl.load(heads + far)
    row, half, key = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, HALF), tl.arange(0, PAGE)
    rows = scored_rows(geometry, MOST, GROUP)
    q += (tl.load(geometry + TOKENS) * GROUP - rows) * (HEADS // GROUP) * DIM
    await_results(FOLLOW)
    low, high = load_turned_rows(q, row, rows, kv_head, half, HEADS, GROUP, DIM)
    size = tl.maximum(tl.sqrt(tl.max(low * low + high * high, 1)), 1e-20) / 127.0  # no rotation makes a channel larger
    low, high = low / size[:, None], high / size[:, None]
    factor = size * (scale * LOG2E / NIBBLE)
    inside = (half < DIM // 2)[None, :]
    out = (far * PADDED + row).to(tl.int64)
    first = far.to(tl.int64) * code_pages
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for page in range(split, past, splits):
        at = (first + tl.load(ids + page)) * PAGE
        packed = tl.load(codes + at * (DIM // 2) + key[:, None] * (DIM // 2) + half[None, :], mask=inside, other=0)
        unit = tl.load(scales + at + key)
        a, b = turn(low, high, cos, sin, tl.minimum(past - page, farthest) + reach, half, DIM)
        scores = tl.dot(_low(packed), tl.trans(_byte(a)), out_dtype=tl.int32)
        scores = tl.dot(_high(packed), tl.trans(_byte(b)), scores, out_dtype=tl.int32)
        scores = scores.to(tl.float32) * unit[:, None]
        best = tl.max(scores, 0)
        mass = best * factor + tl.log2(tl.sum(tl.exp2((scores - best[None, :]) * factor[None, :]), 0))
        mass *= LN2
        tl.store(lse + out * pages + page, mass, mask=row < rows)
        higher = tl.maximum(top, mass)
        total = total * tl.exp(top - higher) + tl.exp(mass - higher)
        top = higher
    tl.store(top_part + out * splits + split, top, mask=row < rows)
    tl.store(sum_part + out * splits + split, total, mask=row < rows)
    tl.store(listed + far, 0)


@triton.jit
def _page_lse_of_many(
    q, codes, scales, heads, ids, geometry, cos, sin, lse, top_part, sum_part, listed, reach, scale, pages,
    code_pages, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, HALF: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr, MOST: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    """As `_page_lse`."""
    split, far, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    past, farthest, kv_head = tl.load(geometry + PAST), tl.load(geometry + FARTHEST), tl.load(heads + far)
    row, half, key = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, HALF), tl.arange(0, PAGE)
    rows = scored_rows(geometry, MOST, GROUP)
    q += (tl.load(geometry + TOKENS) * GROUP - rows) * (HEADS // GROUP) * DIM
    await_results(FOLLOW)
    low, high = load_turned_rows(q, row, rows, kv_head, half, HEADS, GROUP, DIM)
    size = tl.maximum(tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1), 1e-20)
    low, high = (low / size[:, None]).to(tl.float16), (high / size[:, None]).to(tl.float16)
    factor = size * (scale * LOG2E)
    inside = (half < DIM // 2)[None, :]
    out = (far * PADDED + row).to(tl.int64)
    first = far.to(tl.int64) * code_pages
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for page in range(split, past, splits):
        at = (first + tl.load(ids + page)) * PAGE
        packed = tl.load(codes + at * (DIM // 2) + key[:, None] * (DIM // 2) + half[None, :], mask=inside, other=0)
        unit = tl.load(scales + at + key)
        lower = (packed & 15).to(tl.float32) - 8.0
        upper = (packed >> 4).to(tl.float32) - 8.0
        distance = reach - tl.minimum(past - page, farthest)  # keys turn backwards where rows would turn forwards
        lower, upper = turn(lower, upper, cos, sin, distance, half, DIM)
        scores = dot(low, tl.trans(lower.to(tl.float16)), tl.zeros([ROWS, PAGE], tl.float32))
        scores = dot(high, tl.trans(upper.to(tl.float16)), scores) * unit[None, :]
        best = tl.max(scores, 1)
        mass = best * factor + tl.log2(tl.sum(tl.exp2((scores - best[:, None]) * factor[:, None]), 1))
        mass *= LN2
        tl.store(lse + out * pages + page, mass, mask=row < rows)
        higher = tl.maximum(top, mass)
        total = total * tl.exp(top - higher) + tl.exp(mass - higher)
        top = higher
    tl.store(top_part + out * splits + split, top, mask=row < rows)
    tl.store(sum_part + out * splits + split, total, mask=row < rows)
    tl.store(listed + far, 0)


class PageScores:
    """The log of each page's share of every scored row, and what ranking needs beside it. One layer at a time."""

    def __init__(
        self, tokens: int, heads: int, kv_heads: int, pages: int, device: torch.device, units: int, many: int
    ) -> None:
        """For the last `tokens` tokens of a step, of `heads` heads; `units`, `many`: programs that fill the device with
        one token's rows, and with a question's."""
        self.heads, self.kv_heads, self.units, self.many, self.most = heads, kv_heads, units, many, tokens
        padded = triton.next_power_of_2(max(8, tokens * (heads // kv_heads)))
        self.rows, self.far, self.splits = 0, kv_heads, 1  # of the layer that was scored last
        self.lse = torch.empty(kv_heads, padded, pages, dtype=torch.float32, device=device)
        self.top, self.sum = (torch.empty(padded * max(units, many, kv_heads), device=device) for _ in range(2))
        self.keys = torch.empty(2, kv_heads, pages, dtype=torch.int32, device=device)  # of all pages; of the listed
        self.listed = torch.zeros(kv_heads, dtype=torch.int32, device=device)
        self.order = torch.empty(pages, dtype=torch.int32, device=device)

    def __call__(
        self,
        q: Tensor,
        codes: Tensor,
        scales: Tensor,
        heads: Tensor,
        ids: Tensor,
        geometry: Tensor,
        turns: Turns,
        scale: float,
    ) -> None:
        """q [T, heads, dim] turned; codes, scales and heads of one layer, as in `recall.digest.KeyCodes`.

        The geometry says how many of the T are tokens.
        """
        tokens, _, dim = q.shape
        self.far, code_pages = codes.shape[:2]
        self.rows = min(tokens, self.most) * (self.heads // self.kv_heads)
        few = self.rows <= FEW
        block = FEW if few else min(MANY_ROWS, triton.next_power_of_2(max(16, self.rows)))
        blocks = triton.cdiv(self.rows, block)
        self.splits = max(1, min(MOST_SPLITS, (self.units if few else self.many) // (self.far * blocks)))
        (_page_lse if few else _page_lse_of_many)[(self.splits, self.far, blocks)](
            q,
            codes,
            scales,
            heads,
            ids,
            geometry,
            turns.cos,
            turns.sin,
            self.lse,
            self.top,
            self.sum,
            self.listed,
            turns.reach,
            scale,
            self.lse.shape[2],
            code_pages,
            HEADS=self.heads,
            GROUP=self.heads // self.kv_heads,
            DIM=dim,
            PAGE=codes.shape[2],
            HALF=max(32, triton.next_power_of_2(dim // 2)),
            PADDED=self.lse.shape[1],
            ROWS=block,
            MOST=self.most,
            num_warps=WARPS if few else MANY_WARPS,
            **follow(q),
        )
