"""One request as the worker sees it, and how it may be turned away."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.config import PAGE
from engine.errors import EngineError, KVRingError

if TYPE_CHECKING:
    from engine.prepare import Prepared

UNASKED_ROOM = 1024
"""Tokens of an answer whose length nobody asked for that admission keeps host pages for."""


class Overloaded(KVRingError):
    """The queue is full."""


class Unavailable(EngineError):
    """The thread that drives the engine is gone, or being stopped."""


class Admitted:
    """The first event of a job: it left the queue."""


@dataclass(eq=False)
class Job:
    """One request. `deliver` is called on the worker's thread with what happened since the last call."""

    prepared: Prepared
    deliver: Callable[[list[Any]], None]
    guide: Callable[[int, str], Sequence[int]] | None = None  # token -> tokens that must come next
    asked_length: bool = False
    number: int = 0
    arrived: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    first_token: float | None = None
    generated: int = 0
    cancelled: bool = False
    session: Any = None

    @property
    def need(self) -> int:
        """Host pages that admission keeps free for it."""
        longest = self.prepared.max_tokens if self.asked_length else min(self.prepared.max_tokens, UNASKED_ROOM)
        return -(-(len(self.prepared.tokens) + longest) // PAGE)
