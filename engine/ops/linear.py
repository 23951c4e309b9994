"""x W^T + b, by the route that is fastest for one row on a CPU.

A decode step is products of one row, and those move at the memory's pace or slower. For the matrices of one layer of
SmolLM2 on two EPYC cores: oneDNN's 16-bit product, tuned for many rows, 515 us; torch's own vector product 230 us; and
torch's 4-bit product 117 us, because its weights are a quarter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class FourBit:
    """A matrix a second time, as 4-bit codes, for products of one row. Made by `pack_four_bit`."""

    packed: Tensor  # uint8, laid out as this torch's kernel wants it
    scales: Tensor  # bfloat16 [columns / 32, rows, 2]: scale and centre


def pack_four_bit(codes: Tensor, scale: Tensor, centre: Tensor) -> FourBit | None:
    """weight = (code - 8) * scale + centre; codes uint8 [rows, columns], the others float32 [rows, columns / 32].

    Scales are rounded to bfloat16, which errs by as much as rounding the weights would. None where the kernel can't
    take the shape.
    """
    if codes.shape[0] % 16 or not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"):
        return None
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    return FourBit(packed, torch.stack([scale, centre], -1).transpose(0, 1).contiguous().bfloat16())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, four: FourBit | None = None) -> Tensor:
    """x [N, in], weight [out, in], bias [out] -> [N, out], all of one dtype. `four`, if given, serves N = 1."""
    if x.shape[0] != 1 or x.dtype not in _HALF or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    if four is not None:
        out = torch.ops.aten._weight_int4pack_mm_for_cpu(x, four.packed, GROUP, four.scales)
        return out if bias is None else out + bias
    if not torch._C._get_mkldnn_enabled():
        return F.linear(x, weight, bias)
    torch._C._set_mkldnn_enabled(False)  # a process-wide route, not a result: other threads are at worst slower
    try:
        return F.linear(x, weight, bias)
    finally:
        torch._C._set_mkldnn_enabled(True)
