"""safetensors files, one or many shards, read through a memory map after their tables have been checked.

Read here rather than by the `safetensors` package so that a damaged file is refused by name and byte count before any
memory is taken. The format: 8 bytes little-endian header length, a JSON table, then the data.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import ModelError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_LONGEST_TABLE = 100_000_000  # bytes; the format's own limit
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class _Place:
    """Where one tensor lies: byte range counted from the start of the file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFolder:
    """A Hugging Face folder's weights. Implements WeightSource; `files` are the shards."""

    def __init__(self, folder: Path) -> None:
        self._places: dict[str, _Place] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        self.files = _shards(folder)
        for file in self.files:
            for name, place in _read_table(file).items():
                if name in self._places:
                    raise ModelError(
                        f"tensor '{name}' is in both {self._places[name].file.name} and {file.name}",
                        "download the model again",
                    )
                self._places[name] = place
        self.shapes = {name: place.shape for name, place in self._places.items()}

    def blocks(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """All rows at once, as a view of the mapped file (copy-on-write: nothing written to it reaches the file)."""
        place = self._places[name]
        if place.file not in self._maps:
            with place.file.open("rb") as file:
                self._maps[place.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        count = math.prod(place.shape)
        flat = torch.frombuffer(self._maps[place.file], dtype=place.dtype, count=count, offset=place.start)
        yield 0, flat.view(place.shape)

    def nibbles(self, name: str) -> None:
        """No tensor here is quantised."""

    def where(self, name: str) -> str:
        return self._places[name].file.name


def _shards(folder: Path) -> list[Path]:
    """The weight files of a folder, or a refusal that says what is there instead."""
    index = folder / INDEX
    if not index.exists():
        if (folder / SINGLE).exists():
            return [folder / SINGLE]
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
        if pickled:
            raise ModelError(
                f"{folder} holds only pickled weights ({pickled[0]}), which can run code when opened",
                "convert them with transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)",
            )
        raise ModelError(f"{folder} holds no weights", f"it needs {SINGLE}, or {INDEX} and its shards")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index} is not a shard index: {error}", "download that file again") from None
    if any(Path(name).name != name for name in names):
        raise ModelError(f"{index} points outside its folder", "download that file again")
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise ModelError(
            f"{len(missing)} of {len(names)} shards are missing from {folder}, the first is {missing[0]}",
            "download the missing shards",
        )
    return [folder / name for name in names]


def _read_table(file: Path) -> dict[str, _Place]:
    """The tensors of one file, after checking that the file holds every byte that its table promises."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > _LONGEST_TABLE:
            raise ModelError(f"{file} is not a safetensors file", "download it again")
        if size < 8 + length:
            raise ModelError(
                f"{file} is cut short: {size} bytes, its table alone needs {8 + length}", "download it again"
            )
        try:
            table = json.loads(stream.read(length))
            table.pop("__metadata__", None)
            entries = {
                name: (entry["dtype"], tuple(map(int, entry["shape"])), *map(int, entry["data_offsets"]))
                for name, entry in table.items()
            }
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{file} has a damaged table: {error}", "download it again") from None
    places = {}
    for name, (dtype, shape, start, end) in entries.items():
        if dtype not in _DTYPES:
            raise ModelError(
                f"tensor '{name}' in {file.name} has dtype {dtype}", f"dtypes that work: {', '.join(_DTYPES)}"
            )
        needed = math.prod(shape) * _DTYPES[dtype].itemsize
        if start < 0 or end - start != needed:
            raise ModelError(
                f"tensor '{name}' in {file.name} has {end - start} bytes, "
                f"its shape {list(shape)} of {dtype} needs {needed}",
                "download it again",
            )
        places[name] = _Place(file, _DTYPES[dtype], shape, 8 + length + start, 8 + length + end)
    promised = max((place.end for place in places.values()), default=8 + length)
    if size != promised:
        state = "cut short" if size < promised else "longer than its table says"
        raise ModelError(f"{file} is {state}: {size} bytes, expected {promised}", "download it again")
    return places
