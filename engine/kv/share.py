"""How a pool's pages are shared out to what a step sees. Pure arithmetic; refuses with the numbers."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import PAGE
from engine.errors import ConfigError

WORKING = 4
"""Pages beyond the window: room to bring pages in before others go."""


@dataclass(frozen=True)
class WindowBudget:
    """Pages of the pool by purpose: sink + kept + selection + recent + free = pool. The open page counts as recent.

    `kept`: logical pages [first, end) behind the sink that are always seen too: tool definitions.
    """

    pool: int
    sink: int
    selection: int
    recent: int
    free: int
    kept: tuple[int, int] = (0, 0)

    @property
    def always(self) -> int:
        """Pages that are always seen, the recent ones left out."""
        return self.sink + self.kept[1] - self.kept[0]

    def part(self, requests: int) -> WindowBudget:
        """One request's fair share while `requests` of them are active. What is kept is kept whole, on top of it."""
        if requests <= 1:
            return self
        share = self.pool // requests
        sink, free = min(self.sink, share // 4), min(self.free, share // 8)
        kept = self.kept[1] - self.kept[0]
        pool = min(share + kept, self.pool * 3 // 4) if kept else share
        selection = self.selection * share // self.pool
        return WindowBudget(pool, sink, selection, pool - sink - kept - selection - free, free, self.kept)

    @property
    def longest_step(self) -> int:
        """Tokens that one step can add at all, beside what is always seen, one recent and the working pages."""
        return max(1, self.pool - self.always - self.free - 1) * PAGE

    @property
    def step_tokens(self) -> int:
        """Tokens that one step may add: its own pages take at most half of what is left of the pool."""
        return max(1, (self.pool - self.always - self.free - 2) // 2) * PAGE


def least_pages(sink_tokens: int, chunk_tokens: int) -> int:
    """Of a pool: sink, open page, chunk and working pages."""
    return -(-sink_tokens // PAGE) + 1 + -(-chunk_tokens // PAGE) + WORKING


def share_window(pool: int, sink_tokens: int, share: int, chunk_tokens: int, retrieve: str | int) -> WindowBudget:
    """Split `pool` pages; ConfigError when sink, open page, chunk and working pages do not fit in it."""
    sink = -(-sink_tokens // PAGE)
    chunk = -(-chunk_tokens // PAGE)
    least = least_pages(sink_tokens, chunk_tokens)
    if pool < least:
        raise ConfigError(
            f"a pool of {pool} pages ({pool * PAGE:,} tokens) is too small: sink {sink} + open 1 + chunk {chunk} + "
            f"working {WORKING} = {least} pages",
            f"--kv-capacity {least * PAGE} or more, or a smaller --sink or --prefill-chunk",
        )
    room = pool - sink - 1 - WORKING
    if retrieve == "off":
        selection = 0
    elif isinstance(retrieve, int):
        selection = -(-retrieve // PAGE)
        if selection > room:
            raise ConfigError(
                f"a recall budget of {retrieve:,} tokens is {selection} pages; the pool of {pool} has room for {room}",
                f"--retrieve {room * PAGE} or less, or a larger --kv-capacity",
            )
    else:
        selection = min(pool * share // 100, room)
    return WindowBudget(pool, sink, selection, pool - sink - selection - WORKING, WORKING)
