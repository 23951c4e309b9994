"""Which of several equal ways a piece of work takes: by key and length, compiled in or measured on this hardware.

A route is bands `[[last length, schedule], ...]`, strictly increasing; the first band that reaches the length serves,
and the last one serves whatever is longer. A key is its family, or that with a shape: `decode_attention/d128/g4`.
Schedules of one key give the same result; only their speed differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

Bands = tuple[tuple[int, Any], ...]

COMPILED_IN: Mapping[str, Bands] = MappingProxyType(
    {
        "page_gather": ((1, "index_select"),),
        "gather_units": ((1, 16),),
        "decode_attention": ((1, 4),),
        "page_scores": ((1, 16),),
    }
)
"""By family. `page_gather`: how a CPU reads pages out of the pool, by how many; on a card, by pages of the pool:
`gather_units`: programs that read cold pages from pinned memory (16 keep PCIe busy, H200); `decode_attention` and
`page_scores`: programs a multiprocessor."""
CANDIDATES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "page_gather": ("index_select", "take"),
        "gather_units": (16, 8, 32, 64),
        "decode_attention": (4, 2, 8),
        "page_scores": (16, 8, 32),
    }
)
SETTINGS = ("threads", "prefill_chunk")
"""Keys whose schedule is a setting of the engine: a default that flags and switches override."""


def family(key: str) -> str:
    return key.split("/")[0]


def attention_key(head_dim: int, group: int) -> str:
    """`group`: query heads per KV head."""
    return f"decode_attention/d{head_dim}/g{group}"


def pick(bands: Bands, length: int) -> Any:
    """The schedule for `length`."""
    return next((schedule for last, schedule in bands if length <= last), bands[-1][1])


class Routes:
    """The routes in force. `ran` counts, by key and schedule, what was chosen for launches."""

    def __init__(self, measured: Mapping[str, Bands] | None = None, source: str = "compiled in") -> None:
        known = {key: bands for key, bands in (measured or {}).items() if _known(key, bands)}
        self.routes = {**COMPILED_IN, **known}
        self.source = source
        self.routed = len(known)
        self.unknown = sorted(set(measured or ()) - set(known) - set(SETTINGS))
        self.ran: Counter[tuple[str, Any]] = Counter()

    def pick(self, key: str, length: int) -> Any:
        """The schedule of the key itself, else that of its family."""
        schedule = pick(self.routes.get(key) or self.routes[family(key)], length)
        self.ran[key, schedule] += 1
        return schedule


def _known(key: str, bands: Bands) -> bool:
    """A schedule that this build doesn't have (an older or newer one measured it) is not taken."""
    candidates = CANDIDATES.get(family(key), ())
    return bool(candidates) and all(schedule in candidates for _, schedule in bands)
