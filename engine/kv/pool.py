"""The device pool: slots that cache pages, each layer for itself. Dropping a page from it is free and can't fail.

`slot_of[layer, page]` is the only map from pages to slots; `page_in[layer, slot]` is its inverse. A pinned page (open,
or with a copy to the host under way) is never a victim; nor is a page used in the step that is running.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from engine.errors import EngineError
from engine.kv.page import KVShape
from engine.ops.gather import as_words, gather_pages
from engine.routes import Routes


class DevicePool:
    """`data`: [layer, slot, *shape.layer_page] on the device; the tables are host-side (torch backend)."""

    def __init__(
        self, shape: KVShape, slots: int, pages: int, device: torch.device, routes: Routes | None = None
    ) -> None:
        self.shape, self.slots = shape, slots
        self.routes = routes or Routes()
        self.data = torch.zeros(shape.layers, slots, *shape.layer_page, dtype=shape.element, device=device)
        self._slot_of = np.full((shape.layers, pages), -1, dtype=np.int64)
        self._page_in = np.full((shape.layers, slots), -1, dtype=np.int64)
        self._last_used = np.zeros((shape.layers, slots), dtype=np.int64)
        self.pinned = np.zeros(pages, dtype=bool)
        self.tick = 0
        self._lender: Callable[[], None] | None = None
        self._words = as_words(self.data) if device.type == "cpu" else None

    def lend(self, give_back: Callable[[], None]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """slot_of, page_in and last_used go to who works on a copy of them, until somebody asks for them here.

        `give_back` is called then, once, and must bring these arrays up to date.
        """
        self._lender = give_back
        return self._slot_of, self._page_in, self._last_used

    @property
    def lent(self) -> bool:
        return self._lender is not None

    def _home(self) -> None:
        if self._lender is not None:
            give_back, self._lender = self._lender, None
            give_back()

    @property
    def slot_of(self) -> np.ndarray:
        """int64 [layer, page]: the slot, or -1."""
        self._home()
        return self._slot_of

    @property
    def page_in(self) -> np.ndarray:
        """int64 [layer, slot]: the page, or -1."""
        self._home()
        return self._page_in

    @property
    def last_used(self) -> np.ndarray:
        """int64 [layer, slot]: the tick of the last step that saw the page."""
        self._home()
        return self._last_used

    @property
    def bytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def begin_step(self) -> None:
        """A new step: what earlier steps used may be a victim again."""
        self.tick += 1

    def touch(self, layer: int, pages: np.ndarray) -> np.ndarray:
        """Mark resident pages as used in this step; the pages among them that are not resident."""
        slots = self.slot_of[layer][pages]
        if slots.min(initial=0) >= 0:
            self.last_used[layer][slots] = self.tick
            return pages[:0]
        self.last_used[layer][slots[slots >= 0]] = self.tick
        return pages[slots < 0]

    def place(self, layer: int, pages: np.ndarray) -> np.ndarray:
        """Slots for pages that have none: free ones first, then those of the pages least recently used. int64 [n]."""
        if len(pages) == 0:
            return np.empty(0, dtype=np.int64)
        held, blocked = self.page_in[layer], self._blocked(layer)
        age = np.where(held < 0, -1, self.last_used[layer])
        age = np.where(blocked, np.iinfo(np.int64).max, age)
        if self.slots - int(blocked.sum()) < len(pages):
            raise EngineError(
                f"layer {layer}: {len(pages)} pages need slots and only {self.slots - int(blocked.sum())} of "
                f"{self.slots} may be reused",
                "raise --kv-capacity",
            )
        slots = np.argsort(age, kind="stable")[: len(pages)]
        old = held[slots]
        self.slot_of[layer, old[old >= 0]] = -1
        self.page_in[layer, slots] = pages
        self.slot_of[layer, pages] = slots
        self.last_used[layer, slots] = self.tick
        return slots

    def reusable(self, layer: int) -> int:
        """Slots that `place` may give away now."""
        return self.slots - int(self._blocked(layer).sum())

    def _blocked(self, layer: int) -> np.ndarray:
        """bool [slot]: used in this step, or of a pinned page."""
        held = self.page_in[layer]
        return (held >= 0) & ((self.last_used[layer] == self.tick) | self.pinned[held])

    def drop(self, pages: list[int]) -> None:
        """Forget these pages in every layer: their ids are free or their contents void."""
        if not pages:
            return
        ids = np.asarray(pages)
        for layer in range(self.shape.layers):
            slots = self.slot_of[layer, ids]
            self.page_in[layer, slots[slots >= 0]] = -1
            self.slot_of[layer, ids] = -1
        self.pinned[ids] = False

    def void(self) -> None:
        """A step failed: what it claimed slots for may not have arrived. Those pages leave the pool."""
        claimed = (self.last_used == self.tick) & (self.page_in >= 0) & ~self.pinned[self.page_in]
        layers, slots = np.nonzero(claimed)
        self.slot_of[layers, self.page_in[layers, slots]] = -1
        self.page_in[layers, slots] = -1

    def resident(self, layer: int, pages: np.ndarray) -> np.ndarray:
        """bool [n]: which of `pages` have a slot in `layer`."""
        return self.slot_of[layer, pages] >= 0

    def read(self, layer: int, pages: np.ndarray) -> torch.Tensor:
        """[n, *shape.layer_page]: resident pages as they are stored, in the order given."""
        slots = self.slot_of[layer][pages]
        if slots.min(initial=0) < 0:
            raise EngineError(f"layer {layer}: pages {pages[slots < 0].tolist()} were read before they were resident")
        if self._words is None:
            return gather_pages(self.data[layer], None, slots, "index_select")
        schedule = self.routes.pick("page_gather", len(slots))
        return gather_pages(self.data[layer], self._words[layer], slots, schedule)

    def close(self) -> None:
        """Give the memory back."""
        self._words = None
        self.data = self.data.new_empty(0)
