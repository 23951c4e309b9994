"""A matrix times one row, and the gated pair of a feed-forward layer in one pass. Triton; reference: F.linear.

One token's products move at the memory's pace and cuBLAS does not quite: on an H200 the four matrices of an 8B layer
take 107 us with cuBLAS and 99 us here, and the splits of K that cuBLAS merges in a second kernel are not needed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.follow import await_results, follow

ROWS, COLUMNS, WARPS, STAGES = 8, 512, 4, 4
GATED_ROWS, GATED_COLUMNS = 4, 1024
"""The squares that were fastest of eleven on an H200 (3.5 to 4.2 TB/s)."""
LINES, LINE = tl.constexpr(32), tl.constexpr(64)
"""Cache lines of each row that are asked for before the kernel may begin, and the elements of 16 bits in one."""


@triton.jit
def _partial(x, weight, row, n, k, ROWS_: tl.constexpr, COLUMNS_: tl.constexpr, STAGES_: tl.constexpr):
    """float32 [len(row)]: rows of `weight` [n, k] times x [k]."""
    column = tl.arange(0, COLUMNS_)
    base = weight + tl.minimum(row, n - 1).to(tl.int64)[:, None] * k
    sums = tl.zeros([ROWS_, COLUMNS_], tl.float32)
    for start in tl.range(0, k, COLUMNS_, num_stages=STAGES_):
        inside = start + column < k
        a = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
        sums += tl.load(base + start + column[None, :], mask=inside[None, :], other=0.0).to(tl.float32) * a[None, :]
    return tl.sum(sums, 1)


@triton.jit
def _fetch_ahead(weight, first, n, k, ROWS_: tl.constexpr, FOLLOW: tl.constexpr):
    """Ask for the beginnings of the rows while the kernel before still runs: it does not write weights."""
    if FOLLOW:
        i = tl.arange(0, ROWS_ * LINES)
        row = tl.minimum(first + i // LINES, n - 1).to(tl.int64)
        at = weight + row * k + tl.minimum((i % LINES) * LINE, k - 1)
        tl.inline_asm_elementwise("prefetch.global.L2 [$1]; // $0", "=r,l", [at], tl.int32, is_pure=False, pack=1)


@triton.jit
def _matvec(
    x,
    weight,
    bias,
    out,
    n,
    k,
    BIAS: tl.constexpr,
    ROWS_: tl.constexpr,
    COLUMNS_: tl.constexpr,
    STAGES_: tl.constexpr,
    FOLLOW: tl.constexpr,
):
    _fetch_ahead(weight, tl.program_id(0) * ROWS_, n, k, ROWS_, FOLLOW)
    await_results(FOLLOW)
    row = tl.program_id(0) * ROWS_ + tl.arange(0, ROWS_)
    total = _partial(x, weight, row, n, k, ROWS_, COLUMNS_, STAGES_)
    if BIAS:
        total += tl.load(bias + row, mask=row < n, other=0.0).to(tl.float32)
    tl.store(out + row, total.to(out.dtype.element_ty), mask=row < n)


@triton.jit
def _gated(
    x, weight, out, n, k, ROWS_: tl.constexpr, COLUMNS_: tl.constexpr, STAGES_: tl.constexpr, FOLLOW: tl.constexpr
):
    first, i = tl.program_id(0) * (ROWS_ // 2), tl.arange(0, ROWS_)
    _fetch_ahead(weight, first, n, k, ROWS_ // 2, FOLLOW)
    _fetch_ahead(weight, n + first, 2 * n, k, ROWS_ // 2, FOLLOW)
    await_results(FOLLOW)
    own = first + i // 2
    pair = tl.minimum(own, n - 1) + (i % 2) * n  # a gate's row and its partner's beside it
    total = _partial(x, weight, pair, 2 * n, k, ROWS_, COLUMNS_, STAGES_)
    gate, up = tl.split(tl.reshape(total, [ROWS_ // 2, 2]))
    kind = out.dtype.element_ty  # rounded where two passes would round
    gate = gate.to(kind).to(tl.float32)
    row = first + tl.arange(0, ROWS_ // 2)
    tl.store(out + row, (gate * tl.sigmoid(gate)).to(kind) * up.to(kind), mask=row < n)


def serves(x: Tensor, weight: object) -> bool:
    """Whether these kernels may stand in for F.linear: one row on a card, a plain matrix whose rows lie together.

    Not under the interpreter, where a program for every few rows would take minutes: their own test runs them there.
    """
    plain = isinstance(weight, Tensor) and weight.is_contiguous()
    return x.is_cuda and x.shape[0] == 1 and plain and x.is_contiguous()


def matvec(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [1, k], weight [n, k], bias [n] -> [1, n] of x's dtype; sums in float32."""
    n, k = weight.shape
    out = torch.empty(1, n, dtype=x.dtype, device=x.device)
    _matvec[(triton.cdiv(n, ROWS),)](
        x, weight, x if bias is None else bias, out, n, k,
        BIAS=bias is not None, ROWS_=ROWS, COLUMNS_=COLUMNS, STAGES_=STAGES, num_warps=WARPS, **follow(x))  # fmt: skip
    return out


def gated(x: Tensor, weight: Tensor) -> Tensor:
    """x [1, k], weight [2 n, k] -> silu(first half of the product) * second half, [1, n]."""
    n, k = weight.shape[0] // 2, weight.shape[1]
    out = torch.empty(1, n, dtype=x.dtype, device=x.device)
    _gated[(triton.cdiv(2 * n, GATED_ROWS),)](
        x, weight, out, n, k, ROWS_=GATED_ROWS, COLUMNS_=GATED_COLUMNS, STAGES_=1, num_warps=WARPS, **follow(x)
    )
    return out
