"""What the loader needs of a weights file: which tensors it has, of what shape, and their values, one by one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from torch import Tensor

from engine.units import MIB

_WHOLE, _SAMPLES, _SAMPLE = 64 * MIB, 128, 64 << 10


class WeightSource(Protocol):
    """A file or folder of tensors, opened: its table has been read and found whole, its values not yet."""

    files: list[Path]
    shapes: dict[str, tuple[int, ...]]

    def blocks(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """(first row, rows) in order, on the CPU, floating. They may view the mapped file: copy, don't keep."""
        ...

    def raw(self, name: str) -> Tensor:
        """uint8 [rows, bytes of a row]: the blocks of a matrix whose type is one of `quant.TYPES`."""
        ...

    def where(self, name: str) -> str:
        """The file that holds it, for an error message."""
        ...

    def bytes_of(self, name: str) -> int:
        """Bytes of the tensor in its file."""
        ...

    def kind_of(self, name: str) -> str:
        """Its type as the file format names it: F32, BF16, Q4_1."""
        ...


def digest_of(files: Iterable[Path], extra: bytes = b"") -> str:
    """A stable SHA-256 hex of weights files and `extra` (names, config).

    Files up to 64 MiB are read whole. Of a larger one the size, both ends and 128 evenly spaced samples of 64 KiB
    are: cheap at 100 GB, and two fine-tunes of a model differ in practically every sample.
    """
    state = hashlib.sha256(extra)
    for path in sorted(files):
        size = path.stat().st_size
        state.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            if size <= _WHOLE:
                while block := file.read(MIB):
                    state.update(block)
                continue
            for index in range(_SAMPLES):
                file.seek(index * (size - _SAMPLE) // (_SAMPLES - 1))
                state.update(file.read(_SAMPLE))
    return state.hexdigest()
