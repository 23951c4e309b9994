"""GGUF files: metadata and tensors through a memory map, tensors dequantised in blocks of rows.

The values of quantised tensors come from `gguf.dequantize`. The container is read here, not by `gguf.GGUFReader`, which
makes numpy views of every token. What `python -c "import gguf; gguf.GGUFReader('FILE')"` adds (gguf 0.19), and in
brackets what `GGUFFile` does, in CPU time and memory:
150,000 tokens with as many merges and types: 7.0 s, 490 MiB (0.24 s, 27 MiB); the tokens alone: 3.1 s, 200 MiB (0.12 s,
14 MiB); SmolLM2-135M, 49,152 tokens: 2.3 s, 160 MiB (0.09 s, 11 MiB).
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import contextlib
import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from torch import Tensor

from engine.errors import ModelError

MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_NUMPY = {"B": "u1", "b": "i1", "H": "u2", "h": "i2", "I": "u4", "i": "i4", "f": "f4", "?": "?", "Q": "u8", "q": "i8"}
_NUMPY["d"] = "f8"
_STRING, _ARRAY = 8, 9
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCK = 1 << 22  # elements dequantised at once: gguf's intermediates are several times its result


@dataclass(frozen=True)
class _Place:
    """Where one tensor lies: its byte range in the file."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # outermost first, as torch has it
    start: int
    end: int


def is_gguf(path: str | Path) -> bool:
    """By its first bytes: a cache or a download may name the file anything. False where it can't be read."""
    with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC
    return False


class GGUFFile:
    """One GGUF file, its tables read and every tensor's bytes known to be there. Implements WeightSource."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = [path]
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise ModelError(f"{path} is not a GGUF file", "download it again")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        reader = _Reader(self._map, path)
        self.metadata, self._places = _read_tables(reader)
        self.shapes = {name: place.shape for name, place in self._places.items()}

    def blocks(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """(first row, rows) of a tensor, in order; floating, maybe views of the mapped file."""
        place = self._places[name]
        if place.kind.name in _PLAIN:
            dtype, count = _PLAIN[place.kind.name], math.prod(place.shape)
            yield 0, torch.frombuffer(self._map, dtype=dtype, count=count, offset=place.start).view(place.shape)
            return
        rows = math.prod(place.shape[:-1])
        raw = np.frombuffer(self._map, np.uint8, place.end - place.start, place.start).reshape(rows, -1)
        step = max(1, _BLOCK // place.shape[-1])
        for row in range(0, rows, step):
            yield row, torch.from_numpy(dequantize(raw[row : row + step], place.kind))

    def raw(self, name: str) -> Tensor:
        """uint8 [rows, bytes of a row], a view of the mapped file."""
        place = self._places[name]
        count = place.end - place.start
        return torch.frombuffer(self._map, dtype=torch.uint8, count=count, offset=place.start).view(place.shape[0], -1)

    def where(self, name: str) -> str:
        return self.path.name

    def bytes_of(self, name: str) -> int:
        return self._places[name].end - self._places[name].start

    def kind_of(self, name: str) -> str:
        return self._places[name].kind.name


class _Reader:
    """A cursor over the mapped file that refuses to run past its end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.at = 4  # behind the magic

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self.data):
            raise ModelError(
                f"{self.path} is cut short: {len(self.data)} bytes, its tables need at least {end}", "download it again"
            )
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def number(self, code: str) -> Any:
        layout = struct.Struct("<" + code)
        return layout.unpack(self.take(layout.size))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "surrogateescape")

    def value(self, kind: int) -> Any:
        """A metadata value; an array of numbers comes as a numpy array, one of strings as a list."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise ModelError(
                f"{self.path} has metadata of unknown type {kind}", "the file is damaged: download it again"
            )
        item, count = self.number("I"), self.number("Q")
        if item in _SCALARS:
            dtype = np.dtype(_NUMPY[_SCALARS[item]]).newbyteorder("<")
            return np.frombuffer(self.take(count * dtype.itemsize), dtype)
        if count * 8 > len(self.data):
            self.take(count * 8)  # refuses
        return [self.value(item) for _ in range(count)]


def _read_tables(reader: _Reader) -> tuple[dict[str, Any], dict[str, _Place]]:
    """Metadata and tensor places, after checking that the file holds every byte the tensors need."""
    path = reader.path
    version = reader.number("I")
    if version not in (2, 3):
        swapped = version >> 24 in (2, 3) and not version & 0xFFFFFF
        what = "big-endian" if swapped else f"of version {version}"
        raise ModelError(f"{path} is a GGUF file {what}", "use a little-endian GGUF file of version 2 or 3")
    tensor_count, pair_count = reader.number("Q"), reader.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = reader.text()
        metadata[key] = reader.value(reader.number("I"))
    if metadata.get("split.count", 0) > 1:
        raise ModelError(
            f"{path} is one of {metadata['split.count']} parts", "merge them with llama.cpp's llama-gguf-split --merge"
        )
    entries = []
    for _ in range(tensor_count):
        name, dimensions = reader.text(), reader.number("I")
        if dimensions > 4:
            raise ModelError(f"tensor '{name}' in {path.name} has {dimensions} dimensions", "download the file again")
        shape = tuple(reader.number("Q") for _ in range(dimensions))[::-1]
        entries.append((name, shape, reader.number("I"), reader.number("Q")))
    alignment = int(metadata.get("general.alignment", 32)) or 32
    start = -(-reader.at // alignment) * alignment
    places = {name: _place(path, name, shape, kind, start + offset) for name, shape, kind, offset in entries}
    needed = max((place.end for place in places.values()), default=start)
    if needed > len(reader.data):
        raise ModelError(
            f"{path} is cut short: {len(reader.data)} bytes, its tensors need {needed}", "download it again"
        )
    return metadata, places


def _place(path: Path, name: str, shape: tuple[int, ...], kind: int, start: int) -> _Place:
    try:
        quant = GGMLQuantizationType(kind)
        block, size = GGML_QUANT_SIZES[quant]
        if quant.name not in _PLAIN:
            dequantize(np.zeros((1, size), np.uint8), quant)
    except (ValueError, KeyError, NotImplementedError):
        label = GGMLQuantizationType(kind).name if kind in set(GGMLQuantizationType) else f"number {kind}"
        raise ModelError(
            f"tensor '{name}' in {path.name} is of type {label}, which the gguf package can't dequantise",
            "use a file quantised as Q8_0, Q6_K, Q5_K, Q4_K or Q4_1, or update the gguf package",
        ) from None
    if not shape or shape[-1] % block:
        raise ModelError(
            f"tensor '{name}' in {path.name} has rows of {shape[-1] if shape else 0}, "
            f"{quant.name} needs multiples of {block}",
            "the file is damaged: download it again",
        )
    return _Place(quant, shape, start, start + math.prod(shape) // block * size)
