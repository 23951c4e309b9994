"""safetensors files, one or many shards, through the `safetensors` package, which maps them and checks their tables.

What is added here: shards and their index, refusals that name the file and its bytes, and no pickles.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ModelError
from engine.units import format_bytes

_ITEM = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # dtypes that are loaded, and the bytes of a value
_LONGEST_TABLE = 100_000_000  # bytes; the format's own limit
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class _Entry:
    """One tensor of one file."""

    file: Path
    opened: Any  # the package's handle of that file
    dtype: str  # as the file spells it
    shape: tuple[int, ...]


class SafetensorsFolder:
    """A Hugging Face folder's weights. Implements WeightSource; `files` are the shards."""

    def __init__(self, folder: Path) -> None:
        self._entries: dict[str, _Entry] = {}
        self.files = _shards(folder)
        for file in self.files:
            for name, entry in _read_table(file).items():
                if name in self._entries:
                    raise ModelError(
                        f"tensor '{name}' is in both {self._entries[name].file.name} and {file.name}",
                        "download the model again",
                    )
                self._entries[name] = entry
        self.shapes = {name: entry.shape for name, entry in self._entries.items()}

    def blocks(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """All rows at once, as a view of the mapped file (copy-on-write: nothing written to it reaches the file)."""
        yield 0, self._entries[name].opened.get_tensor(name)

    def raw(self, name: str) -> Tensor:
        """No tensor here is quantised: never asked for."""
        raise LookupError(name)

    def where(self, name: str) -> str:
        return self._entries[name].file.name

    def bytes_of(self, name: str) -> int:
        return math.prod(self.shapes[name]) * _ITEM[self.kind_of(name)]

    def kind_of(self, name: str) -> str:
        return self._entries[name].dtype


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


def _read_table(file: Path) -> dict[str, _Entry]:
    """The tensors of one file; the package has checked that the file holds every byte that its table promises."""
    try:
        opened = safe_open(file, framework="pt")
    except SafetensorError as error:
        size, promised = file.stat().st_size, _promised(file)
        state = "cut short" if promised is not None and size < promised else "damaged"
        expected = "" if promised in (None, size) else f", its table promises {promised}"
        raise ModelError(f"{file} is {state}: {size} bytes{expected} ({error})", "download it again") from None
    except (RuntimeError, MemoryError) as error:  # torch maps it so that the system counts all of it as memory
        raise ModelError(
            f"{file} is {format_bytes(file.stat().st_size)} in one piece, and this system won't map it ({error})",
            "more swap, or save it in shards: save_pretrained(folder, max_shard_size='2GB')",
        ) from None
    entries = {}
    for name in opened.keys():  # noqa: SIM118 (the handle is no mapping)
        part = opened.get_slice(name)
        entries[name] = _Entry(file, opened, part.get_dtype(), tuple(part.get_shape()))
        if entries[name].dtype not in _ITEM:
            raise ModelError(
                f"tensor '{name}' in {file.name} has dtype {entries[name].dtype}",
                f"dtypes that work: {', '.join(_ITEM)}",
            )
    return entries


def _promised(file: Path) -> int | None:
    """The size that a refused file's table promises; None if even that can't be read."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        try:
            table = json.loads(stream.read(min(length, _LONGEST_TABLE)))
            return 8 + length + max(entry["data_offsets"][1] for name, entry in table.items() if name != "__metadata__")
        except (ValueError, KeyError, AttributeError, TypeError, IndexError):
            return None
