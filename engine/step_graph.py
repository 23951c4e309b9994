"""One step's kernels as CUDA graphs: captured once, replayed with new contents of the same buffers.

Where the host has work to do in the middle of a step (cold pages that only it can read), the step is cut there into a
row of graphs that share one memory pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class StepGraph:
    """`capture` once, then `replay`; what the captured function returned is rewritten by each replay."""

    def __init__(self) -> None:
        self.result: Any = None
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._between: list[Callable[[], None]] = []
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, step: Callable[[], Any]) -> None:
        """Record what `step` launches. Nothing is computed; any error leaves the stream out of capture."""
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
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
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graphs.append(graph)
