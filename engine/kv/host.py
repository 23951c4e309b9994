"""The host store: every page of every sequence, without loss. It is the truth; the pool is a cache of it.

A page id is reserved when a page opens, so closing it can't fail for want of room. Ids are counted references:
a page that two sequences share, or that a checkpoint keeps, is stored once and freed by the last who lets go.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable

import numpy as np
import torch

from engine.errors import EngineError, HostFullError
from engine.kv.page import KVShape
from engine.kv.pinning import Pinning, Registrar
from engine.platform import Platform, this_platform


class HostStore:
    """`data`: [page, layer, *shape.layer_page], committed at once.

    Pinned by and by where there is a registrar; `pin_budget` bytes at most, None: as many as the driver allows.
    """

    def __init__(
        self,
        shape: KVShape,
        pages: int,
        platform: Platform | None = None,
        *,
        registrar: Registrar | None = None,
        pin_budget: int | None = None,
        verify: bool = False,
    ) -> None:
        self.shape, self.pages = shape, pages
        count = pages * shape.page_bytes // shape.element.itemsize
        self._memory = (platform or this_platform()).commit(count * shape.element.itemsize)
        self.data = torch.frombuffer(self._memory, dtype=shape.element, count=count).view(
            pages, shape.layers, *shape.layer_page
        )
        self.references = np.zeros(pages, dtype=np.int32)
        self.replica = np.zeros(pages, dtype=bool)  # True once the whole page has been copied here
        self._free = list(range(pages - 1, -1, -1))
        self._checksum = np.zeros((pages, shape.layers), dtype=np.uint32) if verify else None
        self.pinning: Pinning | None = None
        if registrar is not None:
            self.pinning = Pinning(registrar, self._memory, self.data.data_ptr(), pages, shape.page_bytes, pin_budget)
            weakref.finalize(self, self.pinning.close)  # never waits for `close` alone

    @property
    def pinned_bytes(self) -> int:
        """Bytes in pinned memory so far; `pinning` says of which pages."""
        return self.pinning.bytes if self.pinning else 0

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def bytes(self) -> int:
        return self.pages * self.shape.page_bytes

    def allocate(self, count: int) -> list[int]:
        """`count` fresh page ids, each with one reference. Consecutive where the store allows: reads stream better."""
        if count > len(self._free):
            raise HostFullError(
                f"the host store has {len(self._free)} free pages of {self.pages}, the request needs {count} more",
                "raise --max-context or --host-kv-gib, or wait until another conversation ends",
            )
        pages = [self._free.pop() for _ in range(count)]
        self.references[pages] = 1
        return pages

    def retain(self, pages: list[int]) -> None:
        for page in pages:
            if self.references[page] == 0:
                raise EngineError(f"page {page} was retained after it had been freed")
            self.references[page] += 1

    def release(self, pages: list[int]) -> list[int]:
        """Let go of one reference each; the ids that nobody holds any more (their slots must be dropped too)."""
        freed = []
        for page in pages:
            if self.references[page] == 0:
                raise EngineError(f"page {page} was released more often than it was held")
            self.references[page] -= 1
            if self.references[page] == 0:
                self.replica[page] = False
                freed.append(page)
        self._free.extend(sorted(freed, reverse=True))
        return freed

    def seal(self, pages: list[int], source: Callable[[int, np.ndarray], torch.Tensor] | None = None) -> None:
        """The copy of these pages is complete: they are replicas from now on.

        `source(layer, pages)` reads what was copied where it came from; a checksum of that, not of the copy, is what
        `check` holds fetches against.
        """
        if self._checksum is not None:
            for layer in range(self.shape.layers):
                held = source(layer, np.asarray(pages)) if source else self.data[pages, layer]
                self._checksum[pages, layer] = [zlib.crc32(_bytes(page)) for page in held]
        self.replica[pages] = True

    def check(self, layer: int, page: int, fetched: torch.Tensor) -> None:
        """With `--verify-pages`: what the device got of one layer of a page is what was stored, or an EngineError."""
        if self._checksum is not None and zlib.crc32(_bytes(fetched)) != self._checksum[page, layer]:
            raise EngineError(
                f"page {page} of layer {layer} came back changed from the host store",
                "restart; check the machine's RAM",
            )

    @property
    def verifies(self) -> bool:
        return self._checksum is not None

    def close(self) -> None:
        """Give the memory back."""
        if self.pinning is not None:
            self.pinning.close()
        self.data, self._memory = self.data.new_empty(0), None


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes()
