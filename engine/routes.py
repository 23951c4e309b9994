"""Which of several equal ways a piece of work takes: by key and length, compiled in or measured on this hardware.

A route is bands `[[last length, schedule], ...]`, strictly increasing; the first band that reaches the length serves,
and the last one serves whatever is longer. Schedules of one key give the same result; only their speed differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

Bands = tuple[tuple[int, Any], ...]

COMPILED_IN: Mapping[str, Bands] = MappingProxyType({"page_gather": ((1, "index_select"),)})
"""`page_gather`: how pages are read out of the pool, by how many."""
CANDIDATES: Mapping[str, tuple[Any, ...]] = MappingProxyType({"page_gather": ("index_select", "take")})
SETTINGS = ("threads", "prefill_chunk")
"""Keys whose schedule is a setting of the engine: a default that flags and switches override."""


def pick(bands: Bands, length: int) -> Any:
    """The schedule for `length`."""
    return next((schedule for last, schedule in bands if length <= last), bands[-1][1])


class Routes:
    """The routes in force. `ran` counts, by key and schedule, what was really launched."""

    def __init__(self, measured: Mapping[str, Bands] | None = None, source: str = "compiled in") -> None:
        known = {key: bands for key, bands in (measured or {}).items() if _known(key, bands)}
        self.routes = {**COMPILED_IN, **known}
        self.source = source
        self.routed = len(known)
        self.unknown = sorted(set(measured or ()) - set(known) - set(SETTINGS))
        self.ran: Counter[tuple[str, Any]] = Counter()

    def pick(self, key: str, length: int) -> Any:
        schedule = pick(self.routes[key], length)
        self.ran[key, schedule] += 1
        return schedule


def _known(key: str, bands: Bands) -> bool:
    """A schedule that this build doesn't have (an older or newer one measured it) is not taken."""
    return key in CANDIDATES and all(schedule in CANDIDATES[key] for _, schedule in bands)
