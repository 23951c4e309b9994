"""Random matrices of any quantised type, made as codes and scales, for measuring speed and for trying kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.weights.quant import BYTES, NIBBLES, NONE, SIGNED, Parts, QuantType

_SUB = {NONE: (1, 1), SIGNED: (8, 31), NIBBLES: (8, 15), BYTES: (32, 63)}
"""The range of s."""


def random_parts(kind: QuantType, rows: int, columns: int, spread: float, random: torch.Generator) -> Parts:
    """Weights of mean 0 and standard deviation `spread`, on the generator's device; what a file may hold."""
    device = random.device
    values = torch.tensor(_values(kind), dtype=torch.float32)
    least, most = _SUB[kind.sub]

    def draw(low: int, high: int, size: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return torch.randint(low, high + 1, size, generator=random, device=device, dtype=dtype)

    codes = draw(0, len(values) - 1, (rows, columns), torch.uint8)
    size = spread / float(values.std(correction=0)) / ((least + most) / 2)
    blocks = (rows, columns // kind.block)
    d = torch.full(blocks, size, dtype=torch.float16, device=device)
    m = torch.full(blocks, -kind.low * size * float(values.mean()), dtype=torch.float16, device=device)
    if kind.sub == NONE:
        return Parts(codes, d, m if kind.low else None)
    groups = (rows, columns // kind.group)
    if kind.sub == SIGNED:
        return Parts(codes, d, sub=draw(least, most, groups, torch.int8))
    width, dtype = (4, torch.uint8) if kind.sub == NIBBLES else (8, torch.int16)
    s = draw(least, most, groups, dtype)
    return Parts(codes, d, m, s | s << width)  # n = s: the mean is taken off in every group


def _values(kind: QuantType) -> list[float]:
    if kind.table:
        return list(kind.table)
    codes = 3 if kind.ternary else 1 << sum(kind.planes)
    return [kind.step * code - kind.offset for code in range(codes)]
