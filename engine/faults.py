"""Faults that a gate puts into a running engine on purpose, to see that they are noticed. Nothing else calls these."""

from __future__ import annotations

import torch

from engine.errors import EngineError
from engine.runner import Runner


def flip_bit(runner: Runner, page: int) -> None:
    """In the host's replica of a page; again mends it."""
    runner.host.data[page].view(torch.uint8).view(-1)[0] ^= 1


def shuffle_pages(runner: Runner, pages: list[int], seed: int) -> None:
    """Let each of these pages hold another one's bytes; the pool forgets them. Nothing mends it."""
    order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(seed))
    for layer in range(runner.host.shape.layers):  # one at a time: all at once are a second store
        runner.host.data[pages, layer] = runner.host.data[torch.tensor(pages)[order], layer]
    runner.host.seal(pages)
    runner.pool.drop(pages)


def fail_copy(runner: Runner, after: int) -> None:
    """The copy to the host fails once, at the page that comes `after` pages from now; those before it are copied."""
    transfer, left = runner.transfer, after
    copy = transfer.write_through

    def failing(pages: list[int], *more: object) -> None:
        nonlocal left
        left -= len(pages)
        if left >= 0:
            copy(pages, *more)
            return
        del transfer.write_through
        copy(pages[:left])
        raise EngineError("a copy to the host failed, as it was told to")

    transfer.write_through = failing
