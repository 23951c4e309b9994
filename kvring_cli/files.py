"""Files that a command is asked to write: refused before minutes of work, and with the flag that mends it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

from engine.errors import KVRingError
from engine.files import write_whole

IN_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)
"""Why a file that may be written can't be replaced: its folder is another's, or it is mounted by itself."""


def check_writable(flag: str, path: str) -> None:
    """KVRingError if nothing can be written there: tried before the work, not after. What is there stays."""
    check_named(flag, path)
    try:
        target = _target(path)
        new = not target.exists()
        if new or target.is_file():
            with target.open("ab"):
                pass
            if new:
                target.unlink()
        elif target.is_dir() or not os.access(target, os.W_OK):  # a pipe or device is only asked: opening it may wait
            raise KVRingError(f"{path} can't be written", f"another path for {flag}")
    except OSError as error:
        raise _unwritten(flag, path, error) from None


def check_named(flag: str, path: str | None) -> None:
    """KVRingError for an empty name, as a script's unset variable makes one: it stands for no file and no folder."""
    if path == "":
        raise KVRingError(f"{flag} is given an empty name", "a path, or leave it out")


def check_reports(files: Mapping[str, str | None], read: Mapping[str, str | None]) -> None:
    """Every path of `files` (by flag) can be written, no two are one, and none is what the command is to `read`."""
    given = {flag: path for flag, path in files.items() if path is not None}
    for flag, path in given.items():
        check_named(flag, path)
    for one, other in combinations(given, 2):
        if os.path.realpath(given[one]) == os.path.realpath(given[other]):
            raise KVRingError(f"{one} and {other} are the same file, {given[one]}", f"another path for {other}")
    for flag, path in given.items():
        for source, text in read.items():
            if text is not None and os.path.exists(text) and os.path.realpath(path) == os.path.realpath(text):
                raise KVRingError(f"{flag} would overwrite what {source} reads, {path}", f"another path for {flag}")
        check_writable(flag, path)


def write(flag: str, path: str, text: str) -> None:
    """In UTF-8, whole or not at all where it is a file; KVRingError if it fails after all."""
    check_named(flag, path)
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")  # halves of characters, as names of files may hold
    try:
        target = _target(path)
        try:
            if not _is_stream(target):
                return write_whole(target, text)
        except OSError as error:
            if error.errno not in IN_PLACE or not target.exists():
                raise
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritten(flag, path, error) from None


def _target(path: str) -> Path:
    """The file behind a link, so that the link stays."""
    return Path(path) if _is_stream(Path(path)) else Path(os.path.realpath(path))


def _is_stream(path: Path) -> bool:
    """A pipe, a device, or /dev/stdout, whatever that leads to: what can be written and not replaced."""
    return path.absolute().parts[1:2] in (("dev",), ("proc",)) or (path.exists() and not path.is_file())


def _unwritten(flag: str, path: str, error: OSError) -> KVRingError:
    return KVRingError(f"{path} can't be written: {error.strerror}", f"another path for {flag}")


def check_json(path: str | Path | None) -> None:
    """`check_writable` of a command's --json, where it was given."""
    if path is not None:
        check_writable("--json", str(path))


def save_json(path: str | Path | None, value: Any) -> None:
    """`value` to a command's --json, where it was given."""
    if path is not None:
        write("--json", str(path), as_json(value))


def as_json(value: Any) -> str:
    """For people too: indented, every script as it is."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
