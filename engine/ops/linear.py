"""x W^T + b for every form that a matrix may have, by the route that is fastest for its rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops.packed import Mixed, Packed

_HALF = (torch.bfloat16, torch.float16)
Matrix = Tensor | Packed | Mixed
"""[out, in]: plain, packed, or parts of several types one below the other."""


def linear(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """x [N, in], weight [out, in], bias [out] -> [N, out], all of one dtype."""
    if isinstance(weight, Tensor):
        return _plain(x, weight, bias)
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    row = 0
    for part in weight.parts if isinstance(weight, Mixed) else (weight,):
        piece = out[:, row : row + part.shape[0]]
        if isinstance(part, Packed):
            part.kernels.multiply(x, part, piece)
        else:
            piece.copy_(_plain(x, part))
        row += part.shape[0]
    return out if bias is None else out.add_(bias)


def gated(x: Tensor, gate_up: Matrix, bias: Tensor | None, swiglu: Callable[[Tensor], Tensor]) -> Tensor:
    """x [N, in], gate_up [2 ffn, in] -> swiglu of `linear` [N, ffn]; of one row by one kernel where there is one."""
    fused = gate_up.kernels.gated if isinstance(gate_up, Packed) and bias is None and x.shape[0] == 1 else None
    if fused is None:
        return swiglu(linear(x, gate_up, bias))
    out = torch.empty(1, gate_up.rows // 2, dtype=x.dtype, device=x.device)
    fused(x, gate_up, out)
    return out


def embedding(index: Tensor, weight: Matrix) -> Tensor:
    """Rows of a matrix: index int64 [n] -> [n, in]."""
    return F.embedding(index, weight) if isinstance(weight, Tensor) else weight.kernels.rows_of(weight, index)


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    one_on_cpu = x.shape[0] == 1 and x.dtype in _HALF and x.device.type == "cpu"
    if not one_on_cpu or not torch._C._get_mkldnn_enabled():
        return F.linear(x, weight, bias)
    torch._C._set_mkldnn_enabled(False)  # a process-wide route, not a result: other threads are at worst slower
    try:
        return F.linear(x, weight, bias)
    finally:
        torch._C._set_mkldnn_enabled(True)
