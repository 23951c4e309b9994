"""Which kernels compute with packed matrices on a device: Triton's where they run and agree, else the reference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from engine import kernel_cache
from engine.ops.norm import swiglu
from engine.ops.packed import TORCH, Kernels, Packed, pack
from engine.weights.quant import TYPES, QuantType
from engine.weights.random_parts import random_parts

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
SIZE = (40, 768)
"""Of the matrix on which kernels are tried."""


def kernels_for(device: torch.device, dtype: torch.dtype, kinds: Iterable[str]) -> tuple[dict[str, Kernels], list[str]]:
    """The kernels of each type, and why not the fast ones where there could be."""
    names = sorted(set(kinds) & set(TYPES))
    if device.type != "cuda":
        return dict.fromkeys(names, TORCH), []
    capability = torch.cuda.get_device_capability(device)
    kernel_cache.point(capability)
    try:
        from engine.ops.triton_packed import LEAST_CAPABILITY, TENSOR_CORES, TRITON
    except ImportError as error:
        trouble = f"packed weights are dequantised at every step, because Triton is not installed: {error}"
        return dict.fromkeys(names, TORCH), [trouble]
    candidates = [(TRITON, "is dequantised at every step, because its kernels")]
    if capability >= LEAST_CAPABILITY and dtype != torch.float32:
        candidates.insert(0, (TENSOR_CORES, "is multiplied without tensor cores, because kernels for them"))
    chosen, troubles = dict.fromkeys(names, TORCH), []
    for name in names:
        for every, then in candidates:
            kernels = every if _gains(TYPES[name]) else replace(every, gated=None)
            trouble = disagreement(name, kernels, device, dtype)
            if not trouble:
                chosen[name] = kernels
                break
            troubles.append(f"{name} {then} {trouble}")
    return chosen, troubles


def _gains(kind: QuantType) -> bool:
    """Whether gate's and up's tiles in one program are faster than a product and a pass after it, by measurement.

    An H200, 24,576 x 4,096, us: Q4_K 22.1 and 23.5, Q2_K 20.2 and 21.2, Q4_0 19.7 and 21.7, IQ3_S 21.4 and 23.7; Q8_0
    36.8 and 34.9, Q5_K 33.4 and 32.0, Q3_K 28.0 and 25.1, IQ4_NL 37.4 and 33.5: two tiles of those take all registers.
    """
    return len(kind.planes) == 1 and not kind.table


def disagreement(name: str, kernels: Kernels, device: torch.device, dtype: torch.dtype) -> str:
    """How products of 1, 3, 12 rows, a gated one and look-ups differ from the reference's; empty where they agree."""
    random = torch.Generator(device).manual_seed(0)
    parts = random_parts(TYPES[name], *SIZE, 0.02, random)
    matrices = [pack(parts, TYPES[name], dtype, TORCH)]
    if TYPES[name].ternary:  # a code 3 has kernels of its own
        matrices.append(pack(replace(parts, codes=parts.codes + 1), TYPES[name], dtype, TORCH))
    try:
        pairs = [pair for matrix in matrices for pair in _pairs(matrix, kernels, random)]
        for got, wanted in pairs:
            error = float((got - wanted).abs().max() / wanted.abs().max())
            if not error <= TOLERANCE[dtype]:
                return f"differ from the reference by {error:.2g} of the largest value"
    except Exception as error:
        return f"could not be built: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


def _pairs(matrix: Packed, kernels: Kernels, random: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """What these kernels give, and the reference."""
    dtype, device = matrix.dtype, matrix.device
    index = torch.tensor([7, 0, 7, SIZE[0] - 1], device=device)
    yield kernels.rows_of(matrix, index), TORCH.rows_of(matrix, index)
    for rows in (1, 3, 12):
        x = torch.randn(rows, SIZE[1], generator=random, device=device).to(dtype)
        got, wanted = (torch.empty(rows, SIZE[0], dtype=dtype, device=device) for _ in range(2))
        kernels.multiply(x, matrix, got)
        TORCH.multiply(x, matrix, wanted)
        yield got, wanted
        if rows == 1 and kernels.gated is not None:
            half = torch.empty(1, SIZE[0] // 2, dtype=dtype, device=device)
            kernels.gated(x, matrix, half)
            yield half, swiglu(wanted)
