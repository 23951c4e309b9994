"""Faults that a gate puts into a running engine on purpose, to see that they are noticed. Nothing else calls these."""

from __future__ import annotations

import numpy as np
import torch

from engine.engine import Engine
from engine.errors import EngineError


def damage_checkpoint(engine: Engine, page: int | None = None) -> int:
    """Flip one bit in a checkpoint page that only the host holds; the page's id. Called again with it, it mends it."""
    runner = engine._runner
    if page is None:
        page = next(page for page in engine._prefix.pages() if runner.pool.slot_of[0, page] < 0)
    runner.host.data[page].view(torch.uint8).view(-1)[0] ^= 1
    return page


def shuffle_checkpoints(engine: Engine, seed: int) -> None:
    """Let every checkpoint page hold another one's bytes; the pool forgets them. Nothing mends it.

    Digests stay those of the bytes before: made later they would lead to the bytes again, and a look-up hardly minds
    where a page stands (measured: 18 of 18 facts found).
    """
    with engine._turn:
        runner, pages = engine._runner, engine._prefix.pages()
        host = runner.host
        if runner.digest_kind is not None:
            device = runner.digests.device
            runner.digests.ensure(
                runner.digest_kind,
                np.array(pages),
                lambda layer, some: host.data[torch.from_numpy(some), layer].to(device),
            )
        order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(seed))
        for layer in range(host.shape.layers):  # one at a time: all at once are a second store
            host.data[pages, layer] = host.data[torch.tensor(pages)[order], layer]
        host.seal(pages)
        runner.pool.drop(pages)


def fail_copy(engine: Engine, after: int) -> None:
    """The copy to the host fails once, at the page that comes `after` pages from now; those before it are copied."""
    transfer, left = engine._runner.transfer, after
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
