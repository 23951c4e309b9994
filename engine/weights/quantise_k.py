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
_MOST = 63
"""The largest of 6 bits."""


def quantise_k(values: np.ndarray, name: str) -> np.ndarray:
    """float32 [rows, columns], a multiple of 256 -> uint8 [rows, bytes of a row] of the type `name`, a key of BITS."""
    x = torch.from_numpy(values).unflatten(1, (-1, GROUPS, GROUP))  # [rows, blocks, 8, 32]
    top = 2 ** BITS[name] - 1
    scale, minimum = _fitted(x, top)
    d, scales = _in_six_bits(scale)
    low, minima = _in_six_bits(minimum)
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
    total, sum_x = weight.sum(-1), (weight * x).sum(-1)
    best = torch.full_like(low, torch.inf)
    scale, minimum = torch.zeros_like(low), torch.zeros_like(low)
    for wider in _WIDENED:
        tried = ((high - low) / (top + wider)).clamp_min(1e-30)[..., None]
        code = ((x - low[..., None]) / tried).round_().clamp_(0, top)
        weighted = weight * code
        sum_code, squares, product = weighted.sum(-1), (weighted * code).sum(-1), (weighted * x).sum(-1)
        spread = total * squares - sum_code.square()
        alone = torch.where(squares > 0, 0, sum_x / total.clamp_min(1e-30))  # no code but one: 0, or any other
        base = torch.where(spread > 0, (squares * sum_x - sum_code * product) / spread, alone).clamp_(max=0)
        fit = torch.where(squares > 0, (product - base * sum_code) / squares, 0).clamp_(min=0)
        error = (weight * (fit[..., None] * code + base[..., None] - x).square()).sum(-1)
        better = error < best
        best = torch.where(better, error, best)
        scale, minimum = torch.where(better, fit, scale), torch.where(better, -base, minimum)
    return scale, minimum


def _in_six_bits(sizes: Tensor) -> tuple[Tensor, Tensor]:
    """[..., 8], 0 or more -> what one of 63 is worth [...], as float16 holds it, and how many each has [..., 8]."""
    unit = (sizes.amax(-1) / _MOST).clamp_max(torch.finfo(torch.float16).max).half().float()
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
