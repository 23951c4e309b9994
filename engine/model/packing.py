"""Which tensors of a file stay packed, and what that makes of their bytes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from engine.ops.four_bit import GROUP
from engine.ops.packed import TORCH, Kernels, takes_four_bit
from engine.units import format_bytes
from engine.weights.quant import TYPES, QuantType
from engine.weights.source import WeightSource

PLAIN_TYPES = ("F64", "F32", "F16", "BF16")
FOUR_BIT = 4 + 32 / GROUP
"""Bits of a weight in torch's 4-bit form, scales included."""


def packed_types(weights: str, device: str, dtype: torch.dtype) -> set[str]:
    """Names of the types that stay packed under `--weights` here; `device` is its type.

    auto: those with fast products; a CPU has them of groups of 32, in bfloat16.
    """
    if weights == "dense":
        return set()
    every = weights != "auto" or device == "cuda"
    return {name for name, kind in TYPES.items() if every or takes_four_bit(kind, dtype)}


@dataclass(frozen=True)
class Packing:
    """How matrices are loaded. `kernels`: by the name of each type that stays packed."""

    device: torch.device
    dtype: torch.dtype
    kernels: Mapping[str, Kernels] = field(default_factory=dict)

    def kind(self, source: WeightSource, name: str) -> QuantType | None:
        """The type as which a tensor stays packed; None for one that is loaded plain."""
        kind = source.kind_of(name)
        return TYPES[kind] if kind in self.kernels and len(source.shapes[name]) == 2 else None


def held_bits(kind: QuantType, device: str, dtype: torch.dtype) -> float:
    """Bits of a packed weight where it is multiplied with."""
    if device != "cpu" or not takes_four_bit(kind, dtype):
        return kind.bits
    return kind.bits - sum(kind.planes) + FOUR_BIT * (1 if sum(kind.planes) <= 4 else 2)


def held_bytes(
    source: WeightSource, names: Iterable[str], types: Iterable[str], device: str, dtype: torch.dtype
) -> int:
    """Bytes that these tensors take when they are loaded; `types` stay packed."""
    packing = Packing(torch.device(device), dtype, dict.fromkeys(types, TORCH))
    bits = 0.0
    for name in names:
        kind = packing.kind(source, name)
        each = 8 * dtype.itemsize if kind is None else held_bits(kind, device, dtype)
        bits += math.prod(source.shapes[name]) * each
    return int(bits / 8)


def explain(source: WeightSource, names: Iterable[str], packing: Packing) -> str:
    """What is loaded larger than the source has it, and what that costs; empty where nothing is."""
    grown: Counter[str] = Counter()
    dtype = str(packing.dtype).removeprefix("torch.")
    for name in names:
        kind, held = packing.kind(source, name), source.kind_of(name)
        size = held_bytes(source, [name], packing.kernels, packing.device.type, packing.dtype)
        more = size - source.bytes_of(name)
        if more > 0.05 * source.bytes_of(name) and len(source.shapes[name]) == 2:
            how = f"{held} is {f'held as {dtype}' if held in PLAIN_TYPES else 'dequantised'}"
            if kind:
                bits = held_bits(kind, packing.device.type, packing.dtype)
                how = f"{held} is held in {bits:.3g} bits a weight instead of {kind.file_bits:.3g}"
            grown[how] += more
    return "; ".join(f"{how}: {format_bytes(more)} more" for how, more in grown.items())
