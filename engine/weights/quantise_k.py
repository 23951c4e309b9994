"""Q4_K and Q5_K, which the `gguf` package reads and can't write: weights of a group are s * code - m.

Of each group of 32 several scales are tried; codes are rounded by each, and scale and minimum fitted to those codes by
least squares that count large weights more. The 8 groups of a block then round their scales and minima to 6 bits of
the block's largest, and codes are rounded once more by what came out. Layout: `_q4_k`, `_q5_k` of weights/quant.py.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

GROUP, GROUPS = 32, 8
BITS = {"Q4_K": 4, "Q5_K": 5}
_WIDENED = torch.linspace(-1.0, 1.0, 5)
"""Codes by which the range of a group is taken wider or narrower than it is."""
_ALIKE = 1e-3
"""Variance of codes that are all one, save for rounding: a sixtieth is the least that two have."""
_MOST = 63
"""The largest of 6 bits."""


def quantise_k(values: np.ndarray, name: str) -> np.ndarray:
    """float32 [rows, columns], a multiple of 256 -> uint8 [rows, bytes of a row] of the type `name`, a key of BITS."""
    x = torch.from_numpy(values).unflatten(1, (-1, GROUPS, GROUP))  # [rows, blocks, 8, 32]
    top = 2 ** BITS[name] - 1
    scale, minimum = _fitted(x, top)
    d, scales = _in_six_bits(scale)
    flat = -x.mean(-1).clamp(max=0)  # of a group that is small beside its block: all of it is -m
    low, minima = _in_six_bits(torch.where(scales > 0, minimum, flat))
    step, floor = (d[..., None] * scales)[..., None], (low[..., None] * minima)[..., None]
    codes = torch.where(step > 0, (x + floor) / step, 0).round_().clamp_(0, top).to(torch.uint8)
    parts = [_half(d), _half(low), _packed_scales(scales.to(torch.uint8), minima.to(torch.uint8))]
    if BITS[name] == 5:
        parts.append(_sum_of_bits(codes >> 4))
    parts.append((codes[..., ::2, :] & 15 | codes[..., 1::2, :] << 4).flatten(-2))
    return torch.cat(parts, -1).flatten(1).numpy()


def _fitted(x: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Scale and minimum [...] of groups x [..., 32], both 0 or more, with the least weighted squared error."""
    weight = x.square().mean(-1, keepdim=True).sqrt() + x.abs()
    low, high = x.amin(-1).clamp(max=0), x.amax(-1)
    total = weight.sum(-1).clamp_min(1e-30)
    mean_x = (weight * x).sum(-1) / total
    best = torch.full_like(low, torch.inf)
    scale, minimum = torch.zeros_like(low), torch.zeros_like(low)
    for wider in _WIDENED:
        tried = ((high - low) / (top + wider)).clamp_min(1e-30)[..., None]
        code = (x - low[..., None]).div_(tried).round_().clamp_(0, top)
        mean_code = (weight * code).sum(-1) / total
        weighted = (code - mean_code[..., None]).mul_(weight)
        spread, product = (weighted * code).sum(-1), (weighted * x).sum(-1)
        alone = torch.where(mean_code > 0, 0, mean_x)  # no code but one: any, or 0
        base = torch.where(spread > _ALIKE * total, mean_x - product / spread * mean_code, alone).clamp_(max=0)
        squares = spread + total * mean_code.square()
        fit = torch.where(squares > 0, (product + total * mean_code * (mean_x - base)) / squares, 0).clamp_(min=0)
        error = code.mul_(fit[..., None]).add_(base[..., None]).sub_(x).square_().mul_(weight).sum(-1)
        better = error < best
        best = torch.where(better, error, best)
        scale, minimum = torch.where(better, fit, scale), torch.where(better, -base, minimum)
    return scale, minimum


def _in_six_bits(sizes: Tensor) -> tuple[Tensor, Tensor]:
    """[..., 8], 0 to 65,504 -> what one of 63 is worth [...], as float16 holds it, and how many each has [..., 8].

    Rounded up where it would become far less, or 0: among the smallest float16 numbers.
    """
    exact = sizes.amax(-1) / _MOST
    unit = exact.half()
    unit = torch.where(unit.float() < 0.999 * exact, (unit.view(torch.int16) + 1).view(torch.float16), unit).float()
    return unit, torch.where(unit[..., None] > 0, sizes / unit[..., None], 0).round().clamp(0, _MOST)


def _half(values: Tensor) -> Tensor:
    return values.half()[..., None].contiguous().view(torch.uint8)


def _packed_scales(scales: Tensor, minima: Tensor) -> Tensor:
    """uint8 [..., 8] each, below 64 -> [..., 12]: the last four leave their upper two bits with the first four."""
    first, last = scales.split(4, -1)
    least, most = minima.split(4, -1)
    return torch.cat([first | last >> 4 << 6, least | most >> 4 << 6, last & 15 | (most & 15) << 4], -1)


def _sum_of_bits(bits: Tensor) -> Tensor:
    """uint8 [..., 8, 32] of 0 and 1 -> [..., 32]: group n's bits are bit n of the bytes."""
    return (bits << torch.arange(GROUPS, dtype=torch.uint8)[:, None]).sum(-2).to(torch.uint8)
