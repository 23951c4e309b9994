"""What goes where: the answer to stdout, everything else to stderr; on any console, in any encoding."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from engine.errors import KVRingError

if TYPE_CHECKING:
    from rich.console import Console


class BadUsage(KVRingError):
    """Options that contradict each other, or that nobody would read: exit 2."""


def soften() -> None:
    """A character that the console's encoding lacks becomes `?`, never an exception."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell: `>&-`
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            with contextlib.suppress(ValueError, OSError):
                reconfigure(errors="replace")


@cache
def err() -> Console:
    """The console for all that is not the answer. Honours NO_COLOR and knows whether it is a terminal."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def say(line: str, style: str | None = None) -> None:
    """A line to stderr, as it is."""
    err().print(line, style=style, markup=False)


def warn(message: str) -> None:
    say(f"warning: {message}", "yellow")


def report(error: KVRingError) -> None:
    """`error: ...` and, where something would mend it, `fix: ...`."""
    say(f"error: {error.message}", "bold red")
    if error.fix:
        say(f"fix: {error.fix}", "green")


def write(text: str) -> None:
    """A piece of the answer to stdout, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_json(value: Any) -> None:
    write(json.dumps(value, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def asked_to_stop() -> Iterator[None]:
    """Inside the block being asked to end (SIGTERM: a service manager, a container, `kill`) is what Ctrl-C is: the
    system's own way would run nothing that tidies up. On the main thread only, as signals are."""
    try:
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Interrupts:
    """Inside the block the first Ctrl-C only sets `asked`, so that a step is never cut in half; a second one cuts.

    Whoever runs the steps looks at `asked` between them. Off the main thread, where no handler can be set, Ctrl-C
    stays what it was.
    """

    def __init__(self, notice: Callable[[], None] = lambda: None) -> None:
        self.asked = False
        self._notice = notice
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        with contextlib.suppress(ValueError):
            self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _ask(self, *_: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._notice()
