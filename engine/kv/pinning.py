"""Pins host memory for the card: in pieces, in the background, within a budget; what can't be pinned stays ordinary.

Registering memory that is there already takes 0.04 s a GiB (H200 host), and one piece that is refused says nothing of
the next. CUDA keeps a failure as its thread's last error and hands it to the thread's next call, whoever makes that:
so pieces are registered on a thread of their own, which also clears each error.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import numpy as np
import torch

from engine.units import GIB, MIB

PIECE = 256 * MIB
REFUSALS = 3
"""Refusals in a row after which the rest isn't tried: the driver has no more to give."""
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context


class Registrar(Protocol):
    """Who pins: CUDA, or a stand-in in tests."""

    def register(self, address: int, size: int) -> bool:
        """Whether it is pinned now. Never raises, and leaves no error behind."""

    def unregister(self, address: int) -> None: ...


class CudaRegistrar:
    """cudaHostRegister for one card."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def register(self, address: int, size: int) -> bool:
        with torch.cuda.device(self.device):
            if int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE)) == 0:
                return True
            try:
                torch.zeros(1, device=self.device)  # takes the error with it
            except RuntimeError:
                torch.zeros(1, device=self.device)
            return False

    def unregister(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)


class Pinning:
    """The pages of one store, pinned in order. `pinned` [pages]: True once a page lies in pinned memory.

    No page lies in two pieces, since a copy may not cross the border of a registration. `memory` is held until all
    is unregistered: memory that is freed while registered corrupts later copies from the same addresses.
    """

    def __init__(
        self, registrar: Registrar, memory: Any, address: int, pages: int, page_bytes: int, budget: int | None
    ) -> None:
        """`budget` in bytes; None: as much as the driver gives."""
        self.pinned = np.zeros(pages, dtype=bool)
        self.refused = 0  # pieces
        self.over_budget = 0  # pieces
        self._registrar, self._memory, self._address, self._page_bytes = registrar, memory, address, page_bytes
        self._budget = pages * page_bytes if budget is None else budget
        self._held: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvring-pin", daemon=True)
        self._thread.start()

    @property
    def bytes(self) -> int:
        return int(self.pinned.sum()) * self._page_bytes

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Until every piece was tried."""
        self._thread.join()

    def close(self) -> None:
        """Stop, and unregister all."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        while self._held:
            self._registrar.unregister(self._held.pop())
        self.pinned[:] = False
        self._memory = None

    def _run(self) -> None:
        step = max(1, PIECE // self._page_bytes)
        in_a_row = 0
        for first in range(0, len(self.pinned), step):
            if self._stop.is_set():
                return
            piece = slice(first, min(first + step, len(self.pinned)))
            size = (piece.stop - first) * self._page_bytes
            if self.bytes + size > self._budget:
                self.over_budget += 1
                continue
            address = self._address + first * self._page_bytes
            if in_a_row < REFUSALS and self._registrar.register(address, size):
                self._held.append(address)
                self.pinned[piece] = True
                in_a_row = 0
            else:
                self.refused += 1
                in_a_row += 1


def most_that_pins(registrar: Registrar, limit: int) -> int:
    """Bytes that can be pinned at once, tried with memory of our own, a GiB and then smaller pieces at a time."""
    held: list[tuple[int, torch.Tensor]] = []
    total, piece = 0, GIB
    while total < limit and piece >= PIECE // 4:
        size = min(piece, limit - total)
        memory = torch.zeros(size, dtype=torch.uint8)
        if registrar.register(memory.data_ptr(), size):
            held.append((memory.data_ptr(), memory))
            total += size
        else:
            piece //= 2
    for address, _ in held:
        registrar.unregister(address)
    return total
