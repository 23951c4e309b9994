"""Where Triton keeps compiled kernels: a folder of this user, this card's capability and these versions, no other's.

A kernel of another card or build is never picked up, and what a full disk or a killed process left half-written is
thrown away before it is read. A folder that the user chose (TRITON_CACHE_DIR) is left alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from engine.files import cache_folder

VARIABLE = "TRITON_CACHE_DIR"
_OURS = "KVRING_TRITON_CACHE"
"""Set beside it where the folder is ours, for child processes and `discard`."""


def versions() -> tuple[str, str, str]:
    """Of kvring, torch and triton."""

    def of(*names: str) -> str:
        for name in names:
            with suppress(metadata.PackageNotFoundError):
                return metadata.version(name)
        return "0"

    return of("kvring"), of("torch"), of("triton", "triton-windows")


def folder(capability: tuple[int, int], root: Path | None = None) -> Path:
    """One for each capability and set of versions; short, for Windows' limit on paths."""
    kvring, torch, triton = versions()
    name = f"{kvring}-torch{torch}-triton{triton}-sm{capability[0]}{capability[1]}"
    return (root or cache_folder()) / "triton" / re.sub(r"[^\w.-]", "_", name)


def point(
    capability: tuple[int, int],
    say: Callable[[str], None] = lambda line: None,
    environ: MutableMapping[str, str] = os.environ,
    root: Path | None = None,
) -> None:
    """Let Triton cache in `folder`; called before its first import. What was damaged there is gone, and said."""
    if environ.get(VARIABLE) and environ.get(_OURS) != environ[VARIABLE]:
        return
    place = folder(capability, root)
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        place = Path(tempfile.mkdtemp(prefix="kvring-triton-"))
        say(f"kernel cache can't be written ({error.strerror or error}): kernels are compiled anew, into {place}")
    damaged = sweep(place)
    if damaged:
        say(f"kernel cache: {damaged} damaged entries thrown away, their kernels are compiled anew")
    environ[VARIABLE] = environ[_OURS] = str(place)


def discard(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Empty the folder if it is ours: what looked whole didn't work. Whether there was anything to empty."""
    place = environ.get(VARIABLE)
    if not place or environ.get(_OURS) != place or not any(Path(place).glob("*")):
        return False
    for entry in Path(place).iterdir():
        shutil.rmtree(entry, ignore_errors=True)
    return True


def sweep(place: Path) -> int:
    """Remove the entries that are not whole; how many they were."""
    damaged = [entry for entry in place.iterdir() if entry.is_dir() and not _whole(entry)]
    for entry in damaged:
        shutil.rmtree(entry, ignore_errors=True)
    return len(damaged)


def _whole(entry: Path) -> bool:
    """Whether each file of an entry is complete, as far as its own words say."""
    try:
        for file in entry.iterdir():
            if file.suffix == ".json":
                found = json.loads(file.read_text(encoding="utf-8"))
                if not all(Path(child).is_file() for child in found.get("child_paths", {}).values()):
                    return False
            elif file.suffix in (".cubin", ".so"):
                if not _whole_elf(file):
                    return False
            elif file.is_file() and not file.stat().st_size:
                return False
    except (OSError, ValueError, AttributeError):
        return False
    return True


def _whole_elf(file: Path) -> bool:
    """The table of sections, which ends an ELF file, lies within it."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(64)
    if len(head) < 64 or head[:5] != b"\x7fELF\x02":
        return False
    start = struct.unpack_from("<Q", head, 40)[0]
    width, count = struct.unpack_from("<HH", head, 58)
    return start + width * count <= size
