"""Which of several equal ways is the fastest here: measured twice, in turns, its output held against the reference."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from engine.routes import Bands
from engine.trials import own_clock
from engine.units import MIB

ROUNDS = 11
WIN = 0.03
"""A candidate must be this much faster than the compiled-in way, in both measurements."""
_FLUSH = {"cpu": 32 * MIB, "cuda": 256 * MIB}  # larger than the last cache

Way = Callable[[], torch.Tensor]


def fastest(ways: Mapping[Any, Way], compiled_in: Any, device: torch.device, agree: Callable = torch.equal) -> Any:
    """The schedule that wins over `compiled_in`, or that itself. One whose output differs can't win."""
    reference = ways[compiled_in]()
    equal = {name: way for name, way in ways.items() if name == compiled_in or agree(way(), reference)}
    first, second = (_medians(equal, device) for _ in range(2))
    winners = [
        name
        for name in equal
        if all(times[name] <= (1 - WIN) * times[compiled_in] for times in (first, second)) and name != compiled_in
    ]
    return min(winners, key=lambda name: first[name] + second[name], default=compiled_in)


def bands(lengths: Sequence[int], schedules: Sequence[Any]) -> Bands:
    """Neighbouring lengths of one schedule are one band."""
    pairs = list(zip(lengths, schedules, strict=True))
    return tuple(
        pair for pair, after in zip(pairs, [*pairs[1:], None], strict=True) if not after or after[1] != pair[1]
    )


def _medians(ways: Mapping[Any, Way], device: torch.device) -> dict[Any, float]:
    """In turns, so that what the machine does meanwhile meets all of them; the caches flushed between."""
    cold = torch.empty(_FLUSH[device.type], dtype=torch.uint8, device=device)
    clock, times = own_clock(device), {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            cold.fill_(1)
            began = clock()
            way()
            times[name].append(clock() - began)
    return {name: statistics.median(found) for name, found in times.items()}
