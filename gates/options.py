"""How gates are to be run, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GateOptions:
    """Tokens where a number is not said to be something else; None takes the gate's own."""

    quick: bool = False
    seeds: int = 1
    grid: bool = False  # long-problem: a map over depth and length
    length: int | None = None  # long-problem, suite and servers: of the longest prompt
    budget: int | None = None  # suite: of the pool; None = 1/16 of the length
    tasks: tuple[str, ...] = ()  # suite: none = every one
    haystack: str | None = None  # the user's own text as filler
    timeout: float = 600.0  # seconds that a server may take for one answer

    def tokens(self, usual: int, quick: int) -> int:
        """How long a gate's documents are."""
        return self.length or (quick if self.quick else usual)

    @property
    def seed_numbers(self) -> range:
        return range(1, self.seeds + 1)
