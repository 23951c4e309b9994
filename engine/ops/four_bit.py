"""4-bit matrices in the form of torch's own 4-bit product, the fastest there is for a few rows on a CPU.

For the matrices of one layer of SmolLM2 on two EPYC cores, one row: oneDNN's 16-bit product, tuned for many rows,
515 us; torch's own vector product 230 us; its 4-bit product 117 us, because its weights are a quarter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
FEW = 16
"""Rows of x up to which it is faster than dequantising and multiplying (SmolLM2's matrices, two EPYC cores)."""


@dataclass(frozen=True)
class FourBit:
    """Made by `pack_four_bit`; computes in bfloat16."""

    packed: Tensor  # uint8, laid out as this torch's kernel wants it
    scales: Tensor  # bfloat16 [columns / 32, rows, 2]: scale and centre

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes

    def multiply(self, x: Tensor) -> Tensor:
        """x bfloat16 [N, columns] -> [N, rows]"""
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed, GROUP, self.scales)


def pack_four_bit(codes: Tensor, scale: Tensor, centre: Tensor) -> FourBit | None:
    """weight = (code - 8) * scale + centre; codes uint8 [rows, columns], the others float32 [rows, columns / 32].

    Scales are rounded to bfloat16, which errs by as much as rounding the weights would. None where the kernel can't
    take the shape.
    """
    if codes.shape[0] % 16 or not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"):
        return None
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    return FourBit(packed, torch.stack([scale, centre], -1).transpose(0, 1).contiguous().bfloat16())
