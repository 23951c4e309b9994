"""A server as a child process: started on a free loopback port, its lines kept, stopped with all that it started."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from engine.platform import this_platform
from gates.within import opener

FAREWELL_SECONDS = 5.0  # from a failed start to the end of the process
STOP_SECONDS = 10.0  # from being asked to stop to being killed
_DOORS = ("--host", "--port", "--api-key")
LEASHED = (sys.executable, "-m", "gates.leash")
_open = opener(urllib.request.ProxyHandler({})).open  # loopback never goes through a proxy


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def indoors(options: Sequence[str]) -> list[str]:
    """A server's options without those that say where it listens and with which key: a trial's own server is on a free
    port of loopback and asked without one."""
    kept, words = [], iter(options)
    for word in words:
        if word in _DOORS:
            next(words, None)
        elif word.partition("=")[0] not in _DOORS:
            kept.append(word)
    return kept


def listening(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


@dataclass(frozen=True)
class Stopped:
    """How a server ended. `left` names the processes of its that outlived it (and were killed then)."""

    seconds: float
    killed: bool
    left: tuple[str, ...]
    still_listening: bool

    @property
    def clean(self) -> bool:
        return not self.killed and not self.left and not self.still_listening


class Child:
    """`with Child(command, port) as child`: whatever happens inside, the process is gone after the block."""

    def __init__(self, command: Sequence[str], port: int) -> None:
        self.port = port
        self.lines: list[str] = []
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"}
        environment.pop("KVRING_API_KEY", None)  # it is asked without one
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, env=environment)
        self._reader = threading.Thread(target=self._read, name="child-lines", daemon=True)
        self._reader.start()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def resources(self) -> dict[str, int]:
        """What the process holds now: `memory` in bytes, `threads`, `handles` (open files and connections)."""
        import psutil

        process = psutil.Process(self._process.pid)
        count = process.num_handles if hasattr(process, "num_handles") else process.num_fds
        return {"memory": process.memory_info().rss, "threads": process.num_threads(), "handles": count()}

    def request(self, path: str, body: dict[str, Any] | None = None, timeout: float = 30.0) -> tuple[int, Any]:
        """Status and JSON of a GET, or of a POST with `body`; OSError where nothing answers in time."""
        data = json.dumps(body).encode() if body is not None else None
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        try:
            with _open(request, timeout=timeout) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        except HTTPException as error:  # cut in the middle
            raise OSError(f"{type(error).__name__}: {error}") from error
        try:
            return status, json.loads(text)
        except ValueError:
            return status, {}

    def wait_ready(self, seconds: float) -> str:
        """`ready`, or `failed`, `exited`, `late`: what kept it from that."""
        deadline, state = time.monotonic() + seconds, None
        while time.monotonic() < deadline:
            if self.exit_code is not None:
                self._reader.join(5.0)
                return "exited"
            with contextlib.suppress(OSError):
                state = self.request("/health", timeout=5.0)[1].get("status")
            if state == "ready":
                return state
            if state == "failed":  # it says why as it ends; wait for that, but not long
                deadline = min(deadline, time.monotonic() + FAREWELL_SECONDS)
            time.sleep(0.05)
        return "failed" if state == "failed" else "late"

    def stop(self) -> Stopped:
        """Ask it to stop, kill it if it won't; then the same for what it started."""
        import psutil

        try:
            started = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.Error:
            started = []
        began, killed = time.monotonic(), False
        if self.exit_code is None:
            this_platform().ask_to_stop(self._process)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            killed = True
            self._process.kill()
            self._process.wait()
        seconds = time.monotonic() - began
        _, alive = psutil.wait_procs(started, timeout=1.0)
        left = tuple(_name(process) for process in alive)
        for process in alive:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._reader.join(5.0)
        return Stopped(seconds, killed, left, listening(self.port))

    def _read(self) -> None:
        with self._process.stdout as stream:
            self.lines.extend(line.decode("utf-8", "replace").rstrip() for line in stream)


def _name(process: Any) -> str:
    import psutil

    try:
        return f"{process.name()} ({process.pid})"
    except psutil.Error:
        return str(process.pid)
