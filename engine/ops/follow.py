"""Programmatic dependent launch: a kernel's programs are placed while the kernel before them still ends.

A step is hundreds of kernels of a few microseconds, and each waits about one for its launch; where the card can
(compute capability 9.0 and newer), it waits for results only. A kernel that takes part calls `await_results` before it
writes anything, or reads what the kernel before it wrote, and so follows all of them. What others left before that one
(the geometry, which a copy brings; weights; the tables of the step before) it may read while it waits: the kernel
before lets it be placed only when those are done.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.nvidia.compiler import CUDAOptions

LEAST_CAPABILITY = (9, 0)


@triton.jit
def await_results(FOLLOW: tl.constexpr):
    """Wait until all that the kernel before wrote is there; the next may be placed from then on."""
    if FOLLOW:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; griddepcontrol.launch_dependents; // $0", "=r", [], tl.int32, is_pure=False, pack=1
        )


@functools.cache
def _follows(device: torch.device) -> bool:
    can = device.type == "cuda" and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY
    return can and "launch_pdl" in CUDAOptions.__dataclass_fields__


FOLLOW_NOBODY = {"FOLLOW": False}
"""Of a kernel that is launched beside the others."""


def follow(tensor: Tensor) -> dict[str, bool]:
    """The launch arguments of a kernel that takes part, on this tensor's device."""
    return {"FOLLOW": True, "launch_pdl": True} if _follows(tensor.device) else FOLLOW_NOBODY
