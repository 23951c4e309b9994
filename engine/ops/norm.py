"""What lies between the matrix products of a layer: the torch reference, as a set that a backend may replace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension; statistics in float32, result in `x.dtype`.

    x [..., n], weight [n] of the same dtype, or float32: then it multiplies before the result is rounded. On a CPU
    torch's own kernel is one call where the formula is six, which a decode step of 60 norms feels.
    """
    if weight.dtype != x.dtype:
        return torch.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, eps).to(x.dtype)
    return torch.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """hidden, delta [T, n] -> their sum, and its RMS norm."""
    total = hidden if delta is None else hidden + delta
    return total, rms_norm(total, weight, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """[T, 2 * n] -> silu(first half) * second half, [T, n]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def geglu(gate_up: Tensor) -> Tensor:
    """[T, 2 * n] -> gelu(first half, its tanh form) * second half, [T, n]."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


def head_norm(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMS norm of each head of q [T, heads, dim] and k [T, kv_heads, dim]; may work in place."""
    return rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)


@dataclass(frozen=True)
class Passes:
    """One way to do them; results agree to rounding."""

    add_rms_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]] = add_rms_norm
    swiglu: Callable[[Tensor], Tensor] = swiglu
    geglu: Callable[[Tensor], Tensor] = geglu
    head_norm: Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] = head_norm


TORCH = Passes()
