"""A pool's tables on the device, for as long as it drives: they go there once and come home when anybody asks."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakMethod

import numpy as np
import torch
from torch import Tensor

from engine.kv.pool import DevicePool
from engine.ops.triton_slots import Tables
from engine.ops.upload import upload


class LentTables:
    """`device`: what kernels read and write, all layers' rows."""

    def __init__(self, pool: DevicePool, pages: int, came_home: Callable[[], None]) -> None:
        """pages: ids of the host store; came_home: a method, called when the host has its tables again.

        Its owner is not kept by it: who holds these tables would hold itself, and a model with it, until Python
        collects cycles.
        """
        self._pool, self._came_home = pool, WeakMethod(came_home)
        layers, on = pool.shape.layers, pool.data.device
        slot_of, page_in, last_used = (
            torch.zeros(layers, size, dtype=torch.int32, device=on) for size in (pages, pool.slots, pool.slots)
        )
        self.device = Tables(slot_of, page_in, last_used, torch.zeros(pages, dtype=torch.uint8, device=on))
        self._pinned: np.ndarray | None = None  # as the device has it

    def take(self) -> None:
        """Let the device have the tables, if it hasn't, and know which pages may not move."""
        pool, device = self._pool, self.device
        if not pool.lent:
            mine = (device.slot_of, device.page_in, device.last_used)
            for table, theirs in zip(mine, pool.lend(self._give_back), strict=True):
                table.copy_(self._upload(theirs.astype(np.int32)))
            self._pinned = None
        if self._pinned is None or not np.array_equal(self._pinned, pool.pinned):
            self._pinned = pool.pinned.copy()
            device.pinned.copy_(self._upload(self._pinned.astype(np.uint8)))

    def slots_of(self, pages: np.ndarray) -> Tensor:
        """int64 [layer, n] on the device, wherever the tables are now."""
        if self._pool.lent:
            return self.device.slot_of.index_select(1, self._upload(pages)).long()
        return self._upload(self._pool.slot_of[:, pages])

    def _give_back(self) -> None:
        pool = self._pool
        pool.page_in[:] = self.device.page_in.cpu().numpy()
        pool.last_used[:] = self.device.last_used.cpu().numpy()
        pool.slot_of[:] = -1
        layers, slots = np.nonzero(pool.page_in >= 0)
        pool.slot_of[layers, pool.page_in[layers, slots]] = slots
        if (came_home := self._came_home()) is not None:
            came_home()

    def _upload(self, array: np.ndarray) -> Tensor:
        return upload(array, self._pool.data.device)
