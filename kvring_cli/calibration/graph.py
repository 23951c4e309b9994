"""Several launches as one CUDA graph: as in a step, none waits for the host."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.step_graph import StepGraph

LAUNCHES = 8


def graphed(work: Callable[[int], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """`work` by the numbers 0 to LAUNCHES - 1; what the last one wrote."""

    def several() -> Tensor:
        return [work(number) for number in range(LAUNCHES)][-1]

    if device.type != "cuda":
        return several
    several()  # compiles
    graph = StepGraph()
    graph.capture(several)

    def replay(kept: object = several) -> Tensor:
        """A graph reads its tensors and doesn't keep them: the function that holds them lives as long as this one."""
        return graph.replay()

    return replay
