"""One step's kernels as CUDA graphs: captured once, replayed with new contents of the same buffers.

Where the host has work to do in the middle of a step (cold pages that only it can read), the step is cut there into a
row of graphs that share one memory pool.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

PRIORITY = -1
"""Of a captured step's own kernels, before those beside it."""
KINDS = 16
"""Kinds of steps whose graphs are kept: those of the latest steps."""
ROWS = 64
"""Steps of several tokens are launched with multiples of so many rows, so that a graph serves many lengths."""


class StepGraph:
    """`capture` once, then `replay`; what the captured function returned is rewritten by each replay."""

    def __init__(self, pool: tuple[int, int] | None = None) -> None:
        """pool: of memory that graphs share which never run at once, none's result being read when another has run."""
        self.result: Any = None
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._between: list[Callable[[], None]] = []
        self.pool = pool

    def capture(self, step: Callable[[], Any]) -> None:
        """Record what `step` launches. Nothing is computed; any error leaves the stream out of capture."""
        torch.cuda.synchronize()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        stream = _capture_stream(torch.cuda.current_device())
        with torch.cuda.stream(stream):
            self._begin()
            try:
                self.result = step()
            finally:
                self._graphs[-1].capture_end()
        torch.cuda.current_stream().wait_stream(stream)

    def cut(self, work: Callable[[], None]) -> None:
        """While capturing: what follows waits for `work`, which the host does at each replay."""
        self._graphs[-1].capture_end()
        self._between.append(work)
        self._begin()

    def replay(self) -> Any:
        self._graphs[0].replay()
        for work, graph in zip(self._between, self._graphs[1:], strict=True):
            work()
            graph.replay()
        return self.result

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        self._graphs.append(graph)


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One for all captures: cuBLAS keeps a workspace for each stream that it was ever called on, 32 MiB on an H200."""
    return torch.cuda.Stream(device, priority=PRIORITY)


class Beside:
    """A second stream for what may run while the step goes on; in its place where there are no streams."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def running(self, work: Callable[[], None]) -> Iterator[None]:
        """Launch `work` after what the step has launched; what is launched within goes on meanwhile.

        What follows, follows both: also after an error, when others need `work`'s buffers, and a capture has to end.
        """
        if self._stream is None:
            work()
            yield
            return
        main = torch.cuda.current_stream()
        self._stream.wait_stream(main)
        try:
            with torch.cuda.stream(self._stream):
                work()
            yield
        finally:
            main.wait_stream(self._stream)


class StepGraphs:
    """The graphs by kind of step. A kind's first step is eager, for it compiles the kernels; its second is captured.

    A capture that fails is tried again once; then every step stays eager, and `failure` says why.
    """

    def __init__(self, wanted: bool) -> None:
        self.wanted, self.failure = wanted, ""
        self._kept: dict[Hashable, StepGraph | None] = {}
        self._building: StepGraph | None = None
        self._pool: tuple[int, int] | None = None

    def rows(self, tokens: int) -> int:
        """With how many rows a step of so many tokens is launched; the further ones count for nothing."""
        return tokens if tokens == 1 or not self.work else -(-tokens // ROWS) * ROWS

    @property
    def work(self) -> bool:
        """Whether steps are captured, as far as is known."""
        return self.wanted and not self.failure

    def run(self, kind: Hashable, launch: Callable[[], Any]) -> tuple[Any, str]:
        """What `launch` returns of a step of this kind, and how it ran: graph or eager."""
        graph = self._graph(kind, launch) if self.wanted else None
        return (launch(), "eager") if graph is None else (graph.replay(), "graph")

    def between(self, work: Callable[[], None]) -> None:
        """Inside `launch`: do the host's work here, now or at every replay of the graph that is being captured."""
        if self._building is None:
            work()
        else:
            self._building.cut(work)

    def _graph(self, kind: Hashable, launch: Callable[[], Any]) -> StepGraph | None:
        if kind not in self._kept:
            while len(self._kept) >= KINDS:
                self._kept.pop(next(iter(self._kept)))
            self._kept[kind] = None
        elif self._kept[kind] is None and not self.failure:
            self._kept[kind] = self._captured(launch) or self._captured(launch)
        self._kept[kind] = self._kept.pop(kind)  # the last to go
        return self._kept[kind]

    def _captured(self, launch: Callable[[], Any]) -> StepGraph | None:
        graph = self._building = StepGraph(self._pool)
        try:
            graph.capture(launch)
        except RuntimeError as error:
            self.failure = f"CUDA graph capture failed: {' '.join(str(error).split())[:160]}"
            return None
        finally:
            self._building = None
        self.failure, self._pool = "", graph.pool
        return graph
