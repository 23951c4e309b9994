"""What this machine can do at best, measured in the run that is held against it: copies, PCIe, matrix products."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.trials import copy_rates, median_seconds
from engine.units import MIB

_SIZE = 512 * MIB
_SIDE = 4096


@dataclass(frozen=True)
class Floors:
    """Bytes a second (a device copy counts its reads and its writes), and operations a second in the model's dtype."""

    device: float
    to_device: float
    matmul: float

    def lines(self) -> str:
        return (
            f"floors | device copy {self.device / 1e9:,.0f} GB/s | host to device {self.to_device / 1e9:,.1f} GB/s "
            f"pinned | matrix product {self.matmul / 1e12:,.1f} TFLOP/s"
        )


def measure_floors(device: torch.device, dtype: torch.dtype) -> Floors:
    """Medians of several runs each; under a second."""
    cuda = device.type == "cuda"
    size = _SIZE if cuda else _SIZE // 4
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * size / median_seconds(lambda: target.copy_(source), device)
    moved = copy_rates(device, size)[0] if cuda else copied / 2
    side = _SIDE * 2 if cuda else _SIDE // 4
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return Floors(copied, moved, 2 * side**3 / median_seconds(lambda: a @ b, device))
