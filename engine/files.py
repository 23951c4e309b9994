"""Files written whole or not at all, whenever the process ends; folders tried before the work; the user's own one."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from uuid import uuid4

from engine.errors import ConfigError
from engine.units import KIB


def cache_folder() -> Path:
    """Where this user's measurements, models and kernels are kept, by the platform's rules.

    ConfigError for a user that has no home, as in a container that was started as one it doesn't know.
    """
    import platformdirs

    fix = "XDG_CACHE_HOME=a folder that can be written, or HOME"
    try:
        path = platformdirs.user_cache_path("kvring")
    except RuntimeError:
        path = Path()
    if not path.is_absolute():  # older platformdirs leave the ~ in it
        raise ConfigError("this user has no home folder, so there is none for kvring's cache", fix)
    return path


def check_folder(folder: Path, fix: str) -> None:
    """ConfigError with this fix where no file of some size can be made in `folder`, which is made if need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(64 * KIB))
    except OSError as error:
        raise ConfigError(f"{folder} can't be written: {error.strerror or error}", fix) from None


def write_whole(path: Path, text: str) -> None:
    """In UTF-8, over what was there, with its permissions or a new file's. OSError if it can't be."""
    scratch = path.with_name(f"{path.name[:64]}.{uuid4().hex}.part")
    try:
        with scratch.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            scratch.chmod(path.stat().st_mode & 0o777)
        os.replace(scratch, path)
    except BaseException:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise
