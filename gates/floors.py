"""What this machine can do at best, measured in the run that is held against it: copies, PCIe, matrix products."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

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
    copied = 2 * size / seconds(lambda: target.copy_(source), device)
    moved = copied / 2
    if cuda:
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        moved = size / seconds(lambda: target.copy_(host, non_blocking=True), device)
    side = _SIDE * 2 if cuda else _SIDE // 4
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return Floors(copied, moved, 2 * side**3 / seconds(lambda: a @ b, device))


def seconds(work: Callable[[], object], device: torch.device, rounds: int = 7) -> float:
    """The median of `rounds` after two that don't count, each waited for."""
    times = []
    for _ in range(rounds + 2):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])
