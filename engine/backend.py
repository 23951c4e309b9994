"""Which backend computes, and why not a faster one. Nothing degrades silently: what was tried and failed is named.

A faster backend is a factory in `FACTORIES`: given the engine's parts it returns a Candidate, or None where it doesn't
apply (another device, a capability it has no kernels for). A candidate that can't be built, or whose self-check
disagrees with the torch reference on this very card, is passed over and said so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine import kernel_cache

Say = Callable[[str], None]


@dataclass(frozen=True)
class Backend:
    """`degraded`: why a faster backend than this one does not serve; empty where none was to be had."""

    name: str  # torch-cpu | torch-cuda | triton-sm90 ...
    reason: str
    degraded: str = ""


class Candidate(Protocol):
    """One faster way to compute a step."""

    name: str

    def build(self) -> Any:
        """Compile and allocate; may raise anything."""

    def disagreement(self, built: Any) -> str:
        """How its result on a small step differs from the torch reference; empty where it agrees. May raise."""


Factory = Callable[[Any], "Candidate | None"]
"""Takes the engine's torch runner (model, pool, host store, digests)."""


def triton(runner: Any) -> Candidate | None:
    """Triton's kernels, where there is a card for them; ImportError where Triton isn't installed."""
    if runner.pool.data.device.type != "cuda":
        return None
    from engine.triton_runner import triton_candidate

    return triton_candidate(runner)


FACTORIES: tuple[Factory, ...] = (triton,)
"""Faster backends, the best first."""


def choose_backend(runner: Any, device: torch.device, factories: Sequence[Factory], say: Say) -> tuple[Backend, Any]:
    """The first candidate that builds and agrees, else the torch runner itself. Each step is said."""
    failures: list[str] = []
    if device.type == "cuda":
        kernel_cache.point(torch.cuda.get_device_capability(device), say)
    for factory in factories:
        began = time.perf_counter()
        try:
            candidate = factory(runner)
        except ImportError as error:
            failures.append(f"{factory.__name__} is not installed: {error}")
            say(f"backend {failures[-1]}")
            continue
        if candidate is None:
            continue
        try:
            built = candidate.build()
            wrong = candidate.disagreement(built)
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            failures.append(f"{candidate.name} could not be built: {type(error).__name__}: {text}")
            say(f"backend {failures[-1]}")
            continue
        if wrong:
            failures.append(f"{candidate.name} disagrees with the torch reference: {wrong}")
            say(f"backend {failures[-1]}")
            continue
        say(f"backend {candidate.name} built and checked in {time.perf_counter() - began:.1f} s")
        return Backend(candidate.name, "built, and its self-check agrees with torch", "; ".join(failures)), built
    name = f"torch-{device.type}"
    reason = "the reference" if failures else "no faster backend is made for this device"
    say(f"backend {name}: {reason}")
    return Backend(name, reason, "; ".join(failures)), runner
