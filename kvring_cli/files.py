"""Files that a command is asked to write: refused before minutes of work, and with the flag that mends it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from engine.errors import KVRingError


def check_writable(flag: str, path: str) -> None:
    """KVRingError if nothing can be written there; asked before the work, not after."""
    folder = Path(path).parent
    if Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise KVRingError(f"{path} can't be written", f"another path for {flag}")


def write(flag: str, path: str, text: str) -> None:
    """In UTF-8; KVRingError if it fails after all."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise KVRingError(f"{path} can't be written: {error.strerror}", f"another path for {flag}") from None


def as_json(value: Any) -> str:
    """For people too: indented, every script as it is."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
