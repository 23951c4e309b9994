"""Layers that see a window of the newest tokens only: append to a sequence's tail, and attend to it. Triton.

Whose tail it is, and where in it a step begins, stands in the step's geometry, so that a captured graph serves every
sequence. One row's window is split among programs; of many rows each program takes some, over all that those see.
References: `Tail.append` of kv/tail.py, and ops/sliding.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.config import PAGE
from engine.ops import geometry as g
from engine.ops.follow import await_results, follow
from engine.ops.rope import Rotary
from engine.ops.triton_attention import LOG2E, dot, merge, soften

TOKENS, POSITION = tl.constexpr(g.TOKENS), tl.constexpr(g.POSITION)
TAIL, TAIL_ROOM, TAIL_AT = map(tl.constexpr, (g.TAIL, g.TAIL_ROOM, g.TAIL_AT))
KEYS = 64
"""Of a program's tile, and so the part of one row's window that one program sees."""


@triton.jit
def _turn(low, high, row, half, cos, sin, DIM: tl.constexpr):
    """Halves [M, H] of channels rotated by the table's rows `row` [M]."""
    at, inside = row[:, None] * (DIM // 2) + half[None, :], (half < DIM // 2)[None, :]
    c, s = tl.load(cos + at, mask=inside, other=0.0), tl.load(sin + at, mask=inside, other=0.0)
    return low * c - high * s, high * c + low * s


@triton.jit
def _turn_to(low, high, position, half, cos, sin, DIM: tl.constexpr, PAGE: tl.constexpr):
    """Rotated to true positions [M]: by their place in a page, then by their page's base."""
    low, high = _turn(low, high, position % PAGE, half, cos, sin, DIM)
    return _turn(low, high, PAGE + position // PAGE, half, cos, sin, DIM)


@triton.jit
def _tail(geometry, layer, kv_head, like, KV_HEADS: tl.constexpr, DIM: tl.constexpr):
    """Where one layer's keys and values of a KV head begin: [token, DIM], of the elements that `like` points to."""
    address = tl.load((geometry + TAIL).to(tl.pointer_type(tl.int64)))
    tail = tl.multiple_of(address.to(tl.pointer_type(like.dtype.element_ty)), 16)
    size = tl.load(geometry + TAIL_ROOM).to(tl.int64) * DIM
    keys = tail + (layer * 2 * KV_HEADS + kv_head) * size
    return keys, keys + KV_HEADS * size


@triton.jit(do_not_specialize=["layer"])
def _append_tail(
    k,  # [T, KV_HEADS, DIM], as v; rows `stride` elements apart
    v,
    geometry,
    cos,  # float32 [PAGE + pages, DIM / 2]: rotation by a place in a page, then by whole pages
    sin,
    k_stride,
    v_stride,
    layer,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HALF: tl.constexpr,
    FOLLOW: tl.constexpr,
):
    await_results(FOLLOW)
    token, kv_head, half = tl.program_id(0) + tl.arange(0, 1), tl.program_id(1), tl.arange(0, HALF)
    inside = (token < tl.load(geometry + TOKENS))[:, None] & (half < DIM // 2)[None, :]
    from_k = k + token.to(tl.int64)[:, None] * k_stride + kv_head * DIM + half[None, :]
    from_v = v + token.to(tl.int64)[:, None] * v_stride + kv_head * DIM + half[None, :]
    low = tl.load(from_k, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(from_k + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    low, high = _turn_to(low, high, tl.load(geometry + POSITION) + token, half, cos, sin, DIM, PAGE)
    keys, values = _tail(geometry, layer, kv_head, k, KV_HEADS, DIM)
    to = (tl.load(geometry + TAIL_AT) + token)[:, None] * DIM + half[None, :]
    tl.store(keys + to, low.to(k.dtype.element_ty), mask=inside)
    tl.store(keys + to + DIM // 2, high.to(k.dtype.element_ty), mask=inside)
    tl.store(values + to, tl.load(from_v, mask=inside), mask=inside)
    tl.store(values + to + DIM // 2, tl.load(from_v + DIM // 2, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["layer"])
def _attend_tail(
    q,  # [T, HEADS, DIM], rows `stride` elements apart; as many count as the geometry says
    geometry,
    cos,
    sin,
    out,  # [splits, T, HEADS, DIM]
    lse,  # float32 [splits, T, HEADS], base 2; not written where WHOLE
    tokens,
    stride,
    window,
    scale,
    layer,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HALF: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WHOLE: tl.constexpr,
    FOLLOW: tl.constexpr,
):
    await_results(FOLLOW)
    split, kv_head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row, half, wide = block * ROWS + tl.arange(0, ROWS), tl.arange(0, HALF), tl.arange(0, WIDE)
    token, head, exists = row // GROUP, kv_head * GROUP + row % GROUP, row < tokens * GROUP
    # A row that doesn't count sees what the last one does: never nothing, and nothing that isn't there.
    token_seen = tl.minimum(token, tl.load(geometry + TOKENS) - 1)
    newest = tl.load(geometry + TAIL_AT) + token_seen
    begin, end = tl.maximum(tl.min(newest, 0) - window + 1, 0), tl.max(newest, 0) + 1

    at = q + token.to(tl.int64)[:, None] * stride + head[:, None] * DIM + half[None, :]
    inside = exists[:, None] & (half < DIM // 2)[None, :]
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32) * scale
    high = tl.load(at + DIM // 2, mask=inside, other=0.0).to(tl.float32) * scale
    low, high = _turn_to(low, high, tl.load(geometry + POSITION) + token_seen, half, cos, sin, DIM, PAGE)
    low, high = low.to(q.dtype.element_ty), high.to(q.dtype.element_ty)
    keys, values = _tail(geometry, layer, kv_head, q, KV_HEADS, DIM)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    sum = tl.zeros([ROWS, WIDE], tl.float32)
    for first in range(begin + split * KEYS, end, KEYS * tl.num_programs(0)):
        key = first + tl.arange(0, KEYS)
        where = keys + key[None, :] * DIM + half[:, None]
        there = (key < end)[None, :] & (half < DIM // 2)[:, None]
        k1, k2 = tl.load(where, mask=there, other=0.0), tl.load(where + DIM // 2, mask=there, other=0.0)
        scores = dot(high, k2, dot(low, k1, tl.zeros([ROWS, KEYS], tl.float32)))
        distance = newest[:, None] - key[None, :]
        scores = tl.where((distance >= 0) & (distance < window), scores, float("-inf"))
        p, fade, best, weight = soften(scores, best, weight)
        there = (key < end)[:, None] & (wide < DIM)[None, :]
        v = tl.load(values + key[:, None] * DIM + wide[None, :], mask=there, other=0.0)
        sum = dot(p.to(v.dtype), v, sum * fade[:, None])
    whole = tl.where(weight > 0, weight, 1.0)
    sum = sum / whole[:, None]
    at = (split * tokens + token).to(tl.int64) * HEADS + head
    if not WHOLE:
        tl.store(lse + at, tl.where(weight > 0, best + tl.log2(whole), float("-inf")), mask=exists)
    to = out + at[:, None] * DIM + wide[None, :]
    tl.store(to, sum.to(out.dtype.element_ty), mask=exists[:, None] & (wide < DIM)[None, :])


class SlidingAttention:
    """For all sliding layers of one model, and sequences of at most `pages` pages."""

    def __init__(self, rope: Rotary, heads: int, kv_heads: int, window: int, pages: int) -> None:
        """rope: the sliding layers' own; window: tokens that a token sees, itself included."""
        device, dim = rope.inv_freq.device, rope.head_dim
        self.heads, self.kv_heads, self.dim, self.window = heads, kv_heads, dim, window
        self._scale = rope.score_scale * LOG2E
        self._turns = rope.cos_sin(torch.cat([torch.arange(PAGE), torch.arange(pages) * PAGE]).to(device))
        self._partial = torch.zeros(triton.cdiv(window, KEYS), 1, heads, dim, device=device)
        self._lse = torch.zeros(self._partial.shape[:3], device=device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, geometry: Tensor) -> Tensor:
        """Append k and v [T, kv_head, dim] to the tail that the geometry tells of, as its layer `layer`, and attend:
        q [T, heads, dim] -> [T, heads, dim] of its dtype. All un-rotated; as many of the T count as the geometry says.
        """
        tokens, half = len(q), triton.next_power_of_2(self.dim // 2)
        common = {"KV_HEADS": self.kv_heads, "DIM": self.dim, "PAGE": PAGE, **follow(q)}
        _append_tail[(tokens, self.kv_heads)](
            k, v, geometry, *self._turns, k.stride(0), v.stride(0), layer, HALF=half, num_warps=1, **common
        )  # fmt: skip
        one, wide = tokens == 1, triton.next_power_of_2(self.dim)
        rows = 16 if one else 64
        keys = KEYS if one or wide * q.itemsize < 512 else KEYS // 2
        out = torch.empty(tokens, self.heads, self.dim, dtype=q.dtype, device=q.device)
        blocks = triton.cdiv(tokens * (self.heads // self.kv_heads), rows)
        _attend_tail[(len(self._lse) if one else 1, self.kv_heads, blocks)](
            q, geometry, *self._turns, self._partial if one else out, self._lse, tokens, q.stride(0), self.window,
            self._scale, layer, HEADS=self.heads, HALF=max(16, half), WIDE=wide, ROWS=rows, KEYS=keys, WHOLE=not one,
            num_warps=8 if rows * wide >= 1 << 14 else 4, num_stages=1 if one else 2, **common,
        )  # fmt: skip
        if one:
            merge(self._partial, self._lse, out)
        return out
