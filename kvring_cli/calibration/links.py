"""What a card's links and units do at their best: copies both ways, on the card, matrix products, the page gather."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from engine import kernel_cache
from engine.routes import COMPILED_IN, pick
from engine.trials import copy_rates, median_seconds
from engine.units import KIB, MIB

Points = list[tuple[str, float, float]]
PAGES = (64 * KIB, 256 * KIB, 1 * MIB, 8 * MIB, 64 * MIB)
"""Bytes copied at a time: a layer of one page of small and large models, a page, and the peak."""
WIDTHS = (1024, 4096, 8192)
ROUNDS = 11


def cases(device: torch.device) -> Iterator[tuple[str, Callable[[], Points]]]:
    """What is measured, and how. Bytes a second by size: h2d and d2h, pinned and pageable; copies on the device; the
    page gather from pinned memory; FLOP a second by width.
    """
    for size in PAGES:
        yield f"copies of {size // KIB:,} KiB", lambda size=size: list(_copies(device, size))
    for size in PAGES:
        if size <= MIB:
            yield f"the gather of {size // KIB:,} KiB", lambda size=size: [("gather", size, gather(device, size))]
    yield "matrix products", lambda: [("matmul/bfloat16", width, _multiply(device, width)) for width in WIDTHS]


def _copies(device: torch.device, size: int) -> Iterator[tuple[str, float, float]]:
    for kind, pinned in (("pinned", True), ("pageable", False)):
        down, up = copy_rates(device, size, pinned=pinned)
        yield f"h2d_{kind}", size, down
        yield f"d2h_{kind}", size, up
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = median_seconds(lambda: target.copy_(source), device, ROUNDS)
    yield "device_copy", size, 2 * size / seconds  # read and written


def _multiply(device: torch.device, width: int) -> float:
    left = torch.randn(width, width, device=device, dtype=torch.bfloat16)
    return 2 * width**3 / median_seconds(lambda: left @ left, device, ROUNDS)


def gather(device: torch.device, size: int) -> float:
    """Bytes a second of 64 pages of `size` read in place by the kernel, many times over."""
    kernel_cache.point(torch.cuda.get_device_capability(device))
    from engine.ops.triton_moves import gather as kernel

    count = 64
    host = torch.empty(count, size // 2, dtype=torch.bfloat16, pin_memory=True)
    pool = torch.empty(count, size // 2, dtype=torch.bfloat16, device=device)
    order = torch.randperm(count).to(device, torch.int32)
    places = torch.arange(count, device=device, dtype=torch.int32)
    missing = torch.tensor([count], device=device, dtype=torch.int32)
    units = pick(COMPILED_IN["gather_units"], 1)
    return count * size / median_seconds(lambda: kernel(host, pool, order, places, missing, units), device, ROUNDS)
