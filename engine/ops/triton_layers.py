"""What lies between the matrix products of a layer, each in one pass. Triton; references: ops/norm.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.follow import await_results, follow
from engine.ops.norm import Passes


@triton.jit
def _add_norm(
    hidden, delta, weight, total, normed, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr, FOLLOW: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    await_results(FOLLOW)
    x = tl.load(hidden + row * width + at, mask=inside, other=0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(delta + row * width + at, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(total + row * width + at, x, mask=inside)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    tl.store(normed + row * width + at, (x * scale * w).to(normed.dtype.element_ty), mask=inside)


def add_rms_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """hidden, delta [T, n] -> their sum, and its RMS norm, both [T, n] of their dtype."""
    normed = torch.empty_like(hidden)
    total = hidden if delta is None else torch.empty_like(hidden)
    width = hidden.shape[1]
    _add_norm[(hidden.shape[0],)](
        hidden,
        hidden if delta is None else delta,
        weight,
        total,
        normed,
        width,
        eps,
        ADD=delta is not None,
        BLOCK=triton.next_power_of_2(width),
        num_warps=8 if width >= 2048 else 4,
        **follow(hidden),
    )
    return total, normed


@triton.jit
def silu_times(gate, up, dtype: tl.constexpr):
    """silu(gate), rounded to dtype, times up: as swiglu in that dtype, of float32 that hold numbers of it."""
    return ((gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up).to(dtype)


@triton.jit
def gelu_times(gate, up, dtype: tl.constexpr):
    """The same of gelu(gate), its tanh form: (1 + tanh(x)) / 2 is sigmoid(2 x)."""
    inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
    return ((gate * tl.sigmoid(inner)).to(dtype).to(tl.float32) * up).to(dtype)


@triton.jit
def _gated(gate_up, out, width, GELU: tl.constexpr, BLOCK: tl.constexpr, FOLLOW: tl.constexpr):
    await_results(FOLLOW)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * 2 * width + at, mask=at < width, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=at < width, other=0.0).to(tl.float32)
    if GELU:
        product = gelu_times(gate, up, out.dtype.element_ty)
    else:
        product = silu_times(gate, up, out.dtype.element_ty)
    tl.store(out + row * width + at, product, mask=at < width)


def swiglu(gate_up: Tensor) -> Tensor:
    """[T, 2 * n] -> silu(first half) * second half, [T, n]."""
    return _activated(gate_up, False)


def geglu(gate_up: Tensor) -> Tensor:
    """[T, 2 * n] -> gelu(first half, its tanh form) * second half, [T, n]."""
    return _activated(gate_up, True)


def _activated(gate_up: Tensor, gelu: bool) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    _gated[(rows, triton.cdiv(width, 1024))](gate_up, out, width, GELU=gelu, BLOCK=1024, num_warps=4, **follow(gate_up))
    return out


@triton.jit
def _head_norm(
    q,
    k,
    q_weight,
    k_weight,
    q_stride,
    k_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    FOLLOW: tl.constexpr,
):
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at, head = tl.arange(0, WIDE), tl.arange(0, BLOCK)
    Q_BLOCKS: tl.constexpr = (HEADS + BLOCK - 1) // BLOCK
    if block < Q_BLOCKS:
        head += block * BLOCK
        exists, base, weight = head < HEADS, q + token * q_stride, q_weight
    else:
        head += (block - Q_BLOCKS) * BLOCK
        exists, base, weight = head < KV_HEADS, k + token * k_stride, k_weight
    inside = exists[:, None] & (at < DIM)[None, :]
    where = base + head[:, None] * DIM + at[None, :]
    w = tl.load(weight + at, mask=at < DIM, other=0.0).to(tl.float32)[None, :]
    await_results(FOLLOW)
    x = tl.load(where, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)
    tl.store(where, (x * scale[:, None] * w).to(q.dtype.element_ty), mask=inside)


def head_norm(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMS norm of each head of q [T, heads, dim] and k [T, kv_heads, dim], in place; heads of a token lie together."""
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    block = 1 if tokens == 1 else 8  # one token's heads are done side by side
    _head_norm[(tokens, triton.cdiv(heads, block) + triton.cdiv(kv_heads, block))](
        q,
        k,
        q_weight,
        k_weight,
        q.stride(0),
        k.stride(0),
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        WIDE=triton.next_power_of_2(dim),
        BLOCK=block,
        num_warps=1,
        **follow(q),
    )
    return q, k


TRITON = Passes(add_rms_norm, swiglu, geglu, head_norm)


@triton.jit
def _merge_into(
    out, lse, more, more_lse, tokens, HEADS: tl.constexpr, WIDE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = row < tokens * HEADS
    at = row[:, None] * DIM + tl.arange(0, WIDE)[None, :]
    inside = exists[:, None] & (tl.arange(0, WIDE) < DIM)[None, :]
    place = (row % HEADS) * tokens + row // HEADS
    a, b = tl.load(lse + place, mask=exists, other=0.0), tl.load(more_lse + place, mask=exists, other=0.0)
    top = tl.maximum(a, b)
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = safe + tl.log(tl.exp(a - safe) + tl.exp(b - safe))
    x = tl.load(out + at, mask=inside, other=0.0)
    y = tl.load(more + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, x * tl.exp(a - total)[:, None] + y * tl.exp(b - total)[:, None], mask=inside)
    tl.store(lse + place, total, mask=exists)


def merge_into(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Merge one more segment's attention into out float32 [T, heads, dim], lse float32 [heads, T], in place."""
    tokens, heads, dim = out.shape
    _merge_into[(triton.cdiv(tokens * heads, 16),)](
        out,
        lse,
        more.contiguous(),
        more_lse.contiguous(),
        tokens,
        HEADS=heads,
        WIDE=triton.next_power_of_2(dim),
        DIM=dim,
        BLOCK=16,
        num_warps=4,
    )
