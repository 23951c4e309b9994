"""x W^T + b, by the route that is fastest for one row on a CPU.

oneDNN's 16-bit matrix product is tuned for many rows: for one it moves 10-15 GB/s of weights on two EPYC cores, where
torch's own vector product moves 29-37 GB/s, the memory's pace. A decode step is nothing but such products.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, in], weight [out, in], bias [out] -> [N, out], all of one dtype."""
    if x.shape[0] == 1 and x.dtype in _HALF and x.device.type == "cpu" and torch._C._get_mkldnn_enabled():
        torch._C._set_mkldnn_enabled(False)  # a process-wide route, not a result: other threads are at worst slower
        try:
            return F.linear(x, weight, bias)
        finally:
            torch._C._set_mkldnn_enabled(True)
    return F.linear(x, weight, bias)
