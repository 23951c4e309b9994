"""Attention over pages where they lie: in the pool, or in pinned host memory read in place. Triton.

Few query rows against the pages of a window, split along it; a second kernel merges the splits by their log-sum-exp.
While scores are still choosing, the window of the step before can be attended to: what comes of it counts if they
choose the same pages, as they mostly do, and else is done again. Where they did not in the step before, it waits.
The query is rotated once per page by the page's distance (`ops/attention.py` says why), so keys are read as stored.
Reference: `PartialAttention` of ops/attention.py.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.config import PAGE
from engine.ops import geometry as g
from engine.ops.follow import FOLLOW_NOBODY, await_results, follow
from engine.ops.geometry import Turns
from engine.ops.triton_codes import Layout, layout_of, load_keys, load_values

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
FEW_WARPS = {True: 2, False: 4}
"""Of a program of 16 rows, by whether pages are plain: codes take registers to convert."""
LOG2E = 1.4426950408889634
PAST, FIRST, OWN, WINDOW, STEADY, TOKENS = map(tl.constexpr, (g.PAST, g.FIRST, g.OWN, g.WINDOW, g.STEADY, g.TOKENS))
STREAMED = tl.constexpr(g.STREAMED)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def dot(a, b, sum):
    """a @ b + sum in float32; Triton's interpreter would multiply the bits of a bfloat16."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sum)
    return tl.dot(a, b, sum, input_precision="ieee")


@triton.jit
def load_turned_rows(q, row, rows, kv_head, half, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr):
    """Both halves of query rows [len(row), len(half)] of one KV head, float32; row = token * GROUP + head in group."""
    at = q + ((row // GROUP) * HEADS + kv_head * GROUP + row % GROUP)[:, None] * DIM + half[None, :]
    mask = (row < rows)[:, None] & (half < DIM // 2)[None, :]
    return tl.load(at, mask=mask, other=0.0).to(tl.float32), tl.load(at + DIM // 2, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def turn(first, second, cos, sin, distance, half, DIM: tl.constexpr):
    """Rotate the halves [M, H] by the table's row `distance`."""
    mask = half < DIM // 2
    at = distance * (DIM // 2) + half
    c = tl.load(cos + at, mask=mask, other=0.0)[None, :]
    s = tl.load(sin + at, mask=mask, other=0.0)[None, :]
    return first * c - second * s, second * c + first * s


@triton.jit
def soften(scores, best, weight):
    """Shares of a tile of base-2 scores [M, N] in a running softmax, what becomes of those before, and its state: the
    highest score and the sum of shares of each row."""
    top = tl.maximum(best, tl.max(scores, 1))
    safe = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(scores - safe[:, None])
    fade = tl.exp2(best - safe)
    return p, fade, top, weight * fade + tl.sum(p, 1)


@triton.jit
def _attend(
    q,  # [tokens, HEADS, DIM], rotated to its offset from the first own page; as many count as the geometry says
    pool,  # [slot, page] of one layer, pages as the layout says
    host,  # [page, ...] of the same layer, pages `host_page` elements apart
    slot_of,  # int32 [page]
    ids,  # int32 [logical page]
    window,  # int32 [n]: logical pages; not read where ALL
    doubt,  # int32 [1]: early, not 0: not to begin; late, 0: nothing is to be done; not read where WHEN is "once"
    geometry,
    cos,  # float32 [reach * 2 + 1, DIM / 2], row `reach` is distance 0
    sin,
    counters,
    partial,  # float32 [splits, T * HEADS, DIM]
    partial_lse,  # float32 [splits, T * HEADS], base 2
    tokens,
    reach,
    scale,
    host_page,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HALF: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    ALL: tl.constexpr,
    COLD: tl.constexpr,
    COMPACT: tl.constexpr,
    WHEN: tl.constexpr,
    FOLLOW: tl.constexpr,
    TYPE: tl.constexpr,  # what codes are multiplied in
    K: tl.constexpr,
    V: tl.constexpr,
    KEY_SCALES: tl.constexpr,
    VALUES: tl.constexpr,
    VALUE_SCALES: tl.constexpr,
    SIZE: tl.constexpr,
):
    split, kv_head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    count = tl.load(geometry + TOKENS)
    past, first, own = tl.load(geometry + PAST), tl.load(geometry + FIRST), tl.load(geometry + OWN)
    seen = past if ALL else tl.load(geometry + WINDOW)
    await_results(FOLLOW)
    if WHEN != "once":
        idle = tl.load(doubt) == 0
        if WHEN == "early":
            idle = (tl.load(geometry + STEADY) == 0) | (tl.load(doubt) != 0)
        if idle:
            return
    if block * ROWS >= count * GROUP:
        return
    total = seen + own
    share = tl.cdiv(total, tl.num_programs(0))
    begin = split * share
    end = tl.minimum(begin + share, total)

    row = block * ROWS + tl.arange(0, ROWS)
    rows = tokens * GROUP
    half, wide, key = tl.arange(0, HALF), tl.arange(0, WIDE), tl.arange(0, PAGE)
    low, high = load_turned_rows(q, row, rows, kv_head, half, HEADS, GROUP, DIM)
    low, high = low * scale, high * scale
    best = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, WIDE], tl.float32)
    cold = 0
    for i in range(begin, end):
        mine = i >= seen
        if ALL:
            page = i
        else:
            page = tl.load(window + i, mask=i < seen, other=0)
            page = tl.where(mine, past + i - seen, page)
        if COMPACT:
            distance = seen - i
        else:
            distance = past - page
        identity = tl.load(ids + page)
        slot = tl.load(slot_of + identity)
        if WHEN == "early":
            slot = tl.maximum(slot, 0)  # a page may be leaving; then all of this is done again
        base = pool + slot.to(tl.int64) * SIZE
        if COLD:
            base = tl.where(slot < 0, host + identity.to(tl.int64) * host_page, base)
            cold += (slot < 0).to(tl.int32)
        a, b = turn(low, high, cos, sin, distance + reach, half, DIM)
        k1, k2, unit = load_keys(base, kv_head * PAGE, key, half, DIM, K, KEY_SCALES, True)
        if K != "plain":
            k1, k2 = k1.to(TYPE), k2.to(TYPE)
        scores = dot(b.to(k2.dtype), k2, dot(a.to(k1.dtype), k1, tl.zeros([ROWS, PAGE], tl.float32)))
        if K != "plain":
            scores *= unit[None, :]
        # An own key is seen by the rows from its own on; the places of past keys are negative, so all rows see them.
        place = (i - seen) * PAGE + key
        scores = tl.where(place[None, :] <= first + (row // GROUP)[:, None], scores, float("-inf"))
        p, fade, best, weight = soften(scores, best, weight)
        v = load_values(base, kv_head * PAGE, key, wide, place < first + count, DIM, WIDE, V, VALUES, VALUE_SCALES)
        if V != "plain":
            v = v.to(TYPE)
        out = dot(p.to(v.dtype), v, out * fade[:, None])
    lse = tl.where(weight > 0, best + tl.log2(weight), float("-inf"))
    out = out / tl.where(weight > 0, weight, 1.0)[:, None]
    # Splits of one row lie together, so that the merge reads a run.
    head = kv_head * GROUP + row % GROUP
    at = split.to(tl.int64) * (tokens * HEADS) + (row // GROUP) * HEADS + head
    tl.store(partial_lse + at, lse, mask=row < rows)
    tl.store(partial + at[:, None] * DIM + wide[None, :], out, mask=(row < rows)[:, None] & (wide < DIM)[None, :])
    if COLD and kv_head == 0 and block == 0:
        tl.atomic_add(counters + STREAMED, cold.to(tl.int64))


@triton.jit
def _merge(
    partial,
    partial_lse,
    out,
    rows,
    splits,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    FOLLOW: tl.constexpr,
):
    await_results(FOLLOW)
    row = tl.program_id(0).to(tl.int64)
    split, wide = tl.arange(0, SPLITS), tl.arange(0, WIDE)
    lse = tl.load(partial_lse + split * rows + row, mask=split < splits, other=float("-inf"))
    part = tl.exp2(lse - tl.max(lse, 0))
    at = (split[:, None] * rows + row) * DIM + wide[None, :]
    x = tl.load(partial + at, mask=(split < splits)[:, None] & (wide < DIM)[None, :], other=0.0)
    merged = tl.sum(x * part[:, None], 0) / tl.sum(part, 0)
    tl.store(out + row * DIM + wide, merged.to(out.dtype.element_ty), mask=wide < DIM)


def merge(partial: Tensor, lse: Tensor, out: Tensor) -> None:
    """Partial results float32 [splits, T, heads, dim] by base-2 lse [splits, T, heads], into out [T, heads, dim]."""
    tokens, heads, dim = out.shape
    _merge[(tokens * heads,)](
        partial,
        lse,
        out,
        tokens * heads,
        len(lse),
        DIM=dim,
        WIDE=triton.next_power_of_2(dim),
        SPLITS=max(2, triton.next_power_of_2(len(lse))),
        num_warps=4,
        **follow(out),
    )


class PagedAttention:
    """Buffers and launch of the two kernels, for at most `tokens` query rows a step."""

    def __init__(self, heads: int, kv_heads: int, dim: int, tokens: int, device: torch.device, units: int) -> None:
        """`units`: programs that fill the device, twice its multiprocessors, say."""
        self.heads, self.kv_heads, self.dim, self.units = heads, kv_heads, dim, units
        self._most = max(self._splits(count) * count for count in range(1, tokens + 1))
        self._partial = torch.zeros(self._most * heads * dim, dtype=torch.float32, device=device)
        self._lse = torch.zeros(self._most * heads, dtype=torch.float32, device=device)

    def _rows(self, tokens: int) -> int:
        return 16 if tokens * (self.heads // self.kv_heads) <= 16 else 64

    def _splits(self, tokens: int) -> int:
        blocks = -(-tokens * (self.heads // self.kv_heads) // self._rows(tokens))
        return max(1, self.units // (self.kv_heads * blocks))

    def __call__(self, q: Tensor, *seen: Any, dtype: torch.dtype, redo: Tensor | None = None) -> Tensor:
        """q [T, heads, dim] -> [T, heads, dim] of `dtype`. seen: the further arguments of `attend`.

        redo: after an `attend` ahead, whether what came of it counts (`Choice.redo`).
        """
        self.attend(q, *seen, dtype=dtype, when="once" if redo is None else "late", doubt=redo)
        tokens = q.shape[0]
        out = torch.empty(tokens, self.heads, self.dim, dtype=dtype, device=q.device)
        rows = self._splits(tokens) * tokens * self.heads
        shape = (-1, tokens, self.heads)
        merge(self._partial[: rows * self.dim].view(*shape, self.dim), self._lse[:rows].view(shape), out)
        return out

    def attend(
        self,
        q: Tensor,
        pool: Tensor,
        host: Tensor | None,
        slot_of: Tensor,
        ids: Tensor,
        window: Tensor | None,
        geometry: Tensor,
        turns: Turns,
        counters: Tensor,
        scale: float,
        compact: bool,
        layout: Layout | None = None,
        *,
        dtype: torch.dtype,
        when: str,
        doubt: Tensor | None = None,
    ) -> None:
        """The first kernel: the splits, which a call merges. Shapes and words as in the kernel.

        window None: all past pages. host: the layer's part of a pinned store, where cold pages may be met; None: every
        page seen is resident. when: `once`; `early`, unless `doubt` or windows are not steady; `late`, if `doubt`.
        """
        tokens = q.shape[0]
        splits, rows = self._splits(tokens), self._rows(tokens)
        blocks = -(-tokens * (self.heads // self.kv_heads) // rows)
        wide, layout = triton.next_power_of_2(self.dim), layout_of(pool, layout)
        _attend[(splits, self.kv_heads, blocks)](
            q,
            pool,
            pool if host is None else host,
            slot_of,
            ids,
            ids if window is None else window,
            ids if doubt is None else doubt,
            geometry,
            turns.cos,
            turns.sin,
            counters,
            self._partial,
            self._lse,
            tokens,
            turns.reach,
            scale * LOG2E,
            0 if host is None else host.stride(0),
            HEADS=self.heads,
            KV_HEADS=self.kv_heads,
            DIM=self.dim,
            PAGE=PAGE,
            HALF=max(16, triton.next_power_of_2(self.dim // 2)),
            WIDE=wide,
            ROWS=rows,
            ALL=window is None,
            COLD=host is not None,
            COMPACT=compact,
            WHEN=when,
            TYPE=TYPES[dtype],
            **layout,
            num_warps=FEW_WARPS[layout["K"] == "plain"] if rows == 16 else 4,
            num_stages=2,
            **(FOLLOW_NOBODY if when == "early" else follow(q)),
        )
