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

FOUR_BIT = 4 + 32 / GROUP
"""Bits of a weight in torch's 4-bit form, scales included."""


def stays_packed(weights: str, device: str, dtype: torch.dtype) -> bool:
    """What `--weights` means here; `device` is its type. A CPU has fast products of packed weights in bfloat16 only."""
    if weights == "auto":
        return device == "cuda" or dtype == torch.bfloat16
    return weights != "dense"


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
    """Bits of a packed weight; on a CPU the form for a few rows is beside it."""
    return kind.bits + (FOUR_BIT if device == "cpu" and takes_four_bit(kind, dtype) else 0)


def held_bytes(source: WeightSource, names: Iterable[str], packed: bool, device: str, dtype: torch.dtype) -> int:
    """Bytes that these tensors take when they are loaded."""
    packing = Packing(torch.device(device), dtype, dict.fromkeys(TYPES, TORCH) if packed else {})
    bits = 0.0
    for name in names:
        kind = packing.kind(source, name)
        each = 8 * dtype.itemsize if kind is None else held_bits(kind, device, dtype)
        bits += math.prod(source.shapes[name]) * each
    return int(bits / 8)


def explain(source: WeightSource, names: Iterable[str], packing: Packing) -> str:
    """What is loaded larger than the file holds it, and what that costs; empty where nothing is."""
    grown: Counter[str] = Counter()
    for name in names:
        kind, held = packing.kind(source, name), source.kind_of(name)
        size = held_bytes(source, [name], kind is not None, "cuda", packing.dtype)  # without a CPU's second form
        more = size - source.bytes_of(name)
        if more > 0.05 * source.bytes_of(name) and len(source.shapes[name]) == 2:
            how = f"{held} is held in {kind.bits:.3g} bits" if kind else f"{held} is dequantised"
            grown[how] += more
    return "; ".join(f"{how}: {format_bytes(more)} more than the file" for how, more in grown.items())
