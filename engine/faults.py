"""Faults that a gate puts into a running engine on purpose, to see that they are noticed. Nothing else calls these."""

from __future__ import annotations

import numpy as np
import torch

from engine.errors import EngineError
from engine.runner import Runner


def flip_bit(runner: Runner, page: int) -> None:
    """In the host's replica of a page; again mends it."""
    runner.host.data[page].view(torch.uint8).view(-1)[0] ^= 1


def shuffle_pages(runner: Runner, pages: list[int], seed: int) -> None:
    """Let each of these pages hold another one's bytes; the pool forgets them. Nothing mends it.

    Digests stay those of the bytes before: made later they would lead to the bytes again, and a look-up hardly minds
    where a page stands (measured: 18 of 18 facts found).
    """
    host = runner.host
    if runner.digest_kind is not None:
        device = runner.digests.device
        runner.digests.ensure(
            runner.digest_kind, np.array(pages), lambda layer, some: host.data[torch.from_numpy(some), layer].to(device)
        )
    order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(seed))
    for layer in range(host.shape.layers):  # one at a time: all at once are a second store
        host.data[pages, layer] = host.data[torch.tensor(pages)[order], layer]
    host.seal(pages)
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
