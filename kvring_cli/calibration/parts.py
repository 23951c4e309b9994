"""A measurement's parts one after the other; one that fails, or that no time is left for, is named and left out."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

Say = Callable[[str, float], None]
Warn = Callable[[str], None]
Part = TypeVar("Part")


class Parts:
    """`done` and `missing` name what was measured so far and what was not; `broken`: what lost the card."""

    def __init__(self, say: Say, warn: Warn) -> None:
        self._say, self._warn = say, warn
        self._began = time.monotonic()
        self.done: list[str] = []
        self.missing: list[str] = []
        self.broken = ""

    def measured(self, cases: Iterable[tuple[str, Callable[[], Part]]], within: float = float("inf")) -> Iterator[Part]:
        """What each case gives. within: seconds after which none is begun."""
        began, cases = time.monotonic(), list(cases)
        for number, (what, measure) in enumerate(cases):
            spent = time.monotonic() - began
            if self.broken:
                self.missing.append(what)
                continue
            if spent > within:
                self._miss(what, f"{within:.0f} s were over before it")
                continue
            self._say(f"{time.monotonic() - self._began:4.0f} s | {what}", number / len(cases))
            try:
                found = measure()
            except Exception as error:  # whatever it was: Triton's own are no RuntimeError
                self._miss(what, f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")
                if _lost():
                    self.broken = what
                    continue
            else:
                self.done.append(what)
                yield found
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()

    def _miss(self, what: str, why: str) -> None:
        self.missing.append(what)
        self._warn(f"{what} not measured: {why}")


def _lost() -> bool:
    """Whether the card answers this process no more: after an illegal access every later call fails."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
