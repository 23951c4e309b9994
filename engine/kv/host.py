"""The host store: every page of every sequence, without loss. It is the truth; the pool is a cache of it.

A page id is reserved when a page opens, so closing it can't fail for want of room. Ids are counted references:
a page that two sequences share, or that a checkpoint keeps, is stored once and freed by the last who lets go.
"""

from __future__ import annotations

import mmap
import weakref
import zlib
from collections.abc import Callable

import numpy as np
import torch

from engine.errors import EngineError, HostFullError
from engine.kv.page import KVShape
from engine.platform import Platform, this_platform
from engine.units import GIB

_PIN_PIECE = GIB  # pinned piece by piece, so that a budget which ends half-way leaves the rest pageable


class HostStore:
    """`data`: [page, layer, k|v, kv_head, 64, head_dim] in ordinary or pinned memory."""

    def __init__(
        self,
        shape: KVShape,
        pages: int,
        platform: Platform | None = None,
        *,
        pin: bool = False,
        verify: bool = False,
    ) -> None:
        self.shape, self.pages = shape, pages
        count = pages * shape.page_bytes // shape.dtype.itemsize
        self._memory = (platform or this_platform()).commit(count * shape.dtype.itemsize)
        self.data = torch.frombuffer(self._memory, dtype=shape.dtype, count=count).view(
            pages, shape.layers, *shape.layer_page
        )
        self.references = np.zeros(pages, dtype=np.int32)
        self.replica = np.zeros(pages, dtype=bool)  # True once the whole page has been copied here
        self._free = list(range(pages - 1, -1, -1))
        self._checksum = np.zeros((pages, shape.layers), dtype=np.uint32) if verify else None
        self._unpin: Callable[[], object] = lambda: None
        self.pinned_bytes = self._pin() if pin else 0

    def _pin(self) -> int:
        """Register the store with the driver; bytes that could be pinned. The rest stays pageable.

        Piece by piece, so that a budget which ends half-way pins the first part; no page lies in two pieces, since a
        copy may not cross the border of a registration.
        """
        piece = max(1, _PIN_PIECE // self.shape.page_bytes) * self.shape.page_bytes
        pinned: list[int] = []
        # Memory that is freed while registered corrupts later copies from the same addresses, so this never waits for
        # `close` alone.
        self._unpin = weakref.finalize(self, _unregister, pinned, self._memory)
        for start in range(0, self.bytes, piece):
            address = self.data.data_ptr() + start
            if int(torch.cuda.cudart().cudaHostRegister(address, min(piece, self.bytes - start), 0)) != 0:
                _clear_error()
                return start
            pinned.append(address)
        return self.bytes

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
        self._unpin()
        self.pinned_bytes = 0


def _unregister(addresses: list[int], memory: mmap.mmap) -> None:
    """`memory` is an argument so that it outlives its registrations."""
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)
    addresses.clear()


def _clear_error() -> None:
    """A failed registration stays the runtime's last error and would fail the next call, whoever makes it."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        torch.zeros(1, device="cuda")


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes()
