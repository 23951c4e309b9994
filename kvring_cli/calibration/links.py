"""What a card's links and units do at their best: copies both ways, on the card, matrix products, the page gather."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine import kernel_cache
from engine.routes import Bands
from engine.trials import copy_rates, median_seconds
from engine.units import KIB, MIB

Say = Callable[[str, float], None]
PAGES = (64 * KIB, 256 * KIB, 1 * MIB, 8 * MIB, 64 * MIB)
"""Bytes copied at a time: a layer of one page of small and large models, a page, and the peak."""
ROUNDS = 11


def measure_links(device: torch.device, say: Say) -> dict[str, Bands]:
    """Bytes a second by size: h2d and d2h, pinned and pageable; copies on the device; the page gather from pinned
    memory; FLOP a second by width.
    """
    rates: dict[str, list[tuple[int, float]]] = {}
    for number, size in enumerate(PAGES):
        say(f"copies of {size // KIB:,} KiB", number / len(PAGES))
        for pinned in (True, False):
            down, up = copy_rates(device, size, pinned=pinned)
            kind = "pinned" if pinned else "pageable"
            rates.setdefault(f"h2d_{kind}", []).append((size, down))
            rates.setdefault(f"d2h_{kind}", []).append((size, up))
        source = torch.empty(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        seconds = median_seconds(lambda a=source, b=target: b.copy_(a), device, ROUNDS)
        rates.setdefault("device_copy", []).append((size, 2 * size / seconds))  # read and written
        gathered = _gather(device, size, say) if size <= MIB else None
        if gathered is not None:
            rates.setdefault("gather", []).append((size, gathered))
    for width in (1024, 2048, 4096, 8192):
        left = torch.randn(width, width, device=device, dtype=torch.bfloat16)
        seconds = median_seconds(lambda a=left: a @ a, device, ROUNDS)
        rates.setdefault("matmul/bfloat16", []).append((width, 2 * width**3 / seconds))
    return {kind: tuple((size, float(f"{rate:.3g}")) for size, rate in found) for kind, found in rates.items()}


def _gather(device: torch.device, size: int, say: Say) -> float | None:
    """Bytes a second of 64 pages of `size` read in place by the kernel; None, and said, where it can't run."""
    try:
        kernel_cache.point(torch.cuda.get_device_capability(device))
        from engine.ops.triton_pages import gather

        count = 64
        host = torch.empty(count, size // 2, dtype=torch.bfloat16, pin_memory=True)
        pool = torch.empty(count, size // 2, dtype=torch.bfloat16, device=device)
        order = torch.randperm(count).to(device, torch.int32)
        places = torch.arange(count, device=device, dtype=torch.int32)
        missing = torch.tensor([count], device=device, dtype=torch.int32)
        units = torch.cuda.get_device_properties(device).multi_processor_count
        seconds = median_seconds(lambda: gather(host, pool, order, places, missing, units), device, ROUNDS)
    except (ImportError, RuntimeError) as error:
        say(f"the gather kernel was not measured: {type(error).__name__}: {str(error)[:120]}", 0.0)
        return None
    return count * size / seconds
