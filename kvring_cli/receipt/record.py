"""What the last starts did, kept on this machine for `kvring receipt`: settings and figures, never content.

One small JSON file a start, the newest few. `KVRING_RECORD=0` keeps none. A disk that can't be written costs the
record and nothing else.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError, OutOfMemoryError
from engine.files import cache_folder
from engine.switches import SETTINGS
from kvring_cli.models import PHANTOM
from kvring_cli.receipt.redact import HIDDEN, is_plain, redact_argv

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.switches import Resolved

SCHEMA = "kvring.start/1"
KEPT_STARTS = 5
KEPT_REQUESTS = 10
_TELLING = (ConfigError, OutOfMemoryError)  # whose messages are made of settings and numbers


def folder() -> Path:
    return cache_folder() / "starts"


class Record:
    """One start, rewritten whole at each change."""

    def __init__(self, resolved: Resolved, argv: Sequence[str] | None = None) -> None:
        self._turn = threading.Lock()
        self._file = folder() / f"{os.getpid()}.json"
        self._wanted = os.environ.get("KVRING_RECORD", "").strip() != "0"
        self._state: dict[str, Any] = {
            "schema": SCHEMA,
            "began": time.time(),
            "pid": os.getpid(),
            "argv": _shown(sys.argv[1:] if argv is None else list(argv)) if self._wanted else [],
            "settings": shown_settings(resolved),
            "lines": [],
            "requests": [],
        }
        self._write()
        atexit.register(self._over)  # a process that was killed leaves no `end`

    def ready(self, engine: Engine, lines: Sequence[str]) -> None:
        """It serves: its notes and start-up lines, and the digest of its model. A model's name may be a file's."""
        name = engine.model.name
        hidden = [line if name == PHANTOM else line.replace(name, "<model>") for line in lines]
        self._set(lines=[*engine.capacity.notes, *hidden], model=engine.model.digest)

    def request(self, line: str) -> None:
        """A request ended, with this line."""
        self._set(requests=[*self._state["requests"], line][-KEPT_REQUESTS:])

    def end(self, error: BaseException | None = None) -> None:
        """It is over; by `error`, if there is one."""
        why = "closed" if error is None else type(error).__name__
        self._set(end=f"{why}: {error}" if isinstance(error, _TELLING) else why)

    def _over(self) -> None:
        if "end" not in self._state:
            self.end()

    def _set(self, **changes: Any) -> None:
        with self._turn:
            self._state |= changes
            self._write()

    def _write(self) -> None:
        if not self._wanted:
            return
        part = self._file.with_name(f".{self._file.name}.part")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(self._state), encoding="utf-8")
            os.replace(part, self._file)  # Windows refuses while somebody reads the old one: the next change writes it
            for old in _newest_first()[KEPT_STARTS:]:
                old.unlink(missing_ok=True)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink()


def last() -> dict[str, Any] | None:
    """The newest start that can be read."""
    for file in _newest_first():
        with contextlib.suppress(OSError, ValueError):
            state = json.loads(file.read_text(encoding="utf-8"))
            if isinstance(state, dict) and state.get("schema") == SCHEMA:
                return state
    return None


def _newest_first() -> list[Path]:
    def age(file: Path) -> float:
        with contextlib.suppress(OSError):
            return -file.stat().st_mtime
        return 0.0

    with contextlib.suppress(OSError):  # another user's, who keeps it shut
        return sorted(folder().glob("*.json"), key=age)
    return []


def shown_settings(resolved: Resolved) -> dict[str, list[Any]]:
    """Value and source by field. A setting that takes free text, a path say, tells its source only."""
    values = {
        setting.field: one.value if one.value is None or is_plain(setting) else HIDDEN
        for setting in SETTINGS
        if (one := resolved.sources[setting.field])
    }
    return {field: [value, resolved.sources[field].source] for field, value in values.items()}


def _shown(argv: list[str]) -> list[str]:
    from kvring_cli.app import app

    for command in app.registered_commands:
        if command.callback and argv and (command.name or command.callback.__name__) == argv[0]:
            return redact_argv(argv, command.callback)
    return []
