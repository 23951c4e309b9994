"""`kvring top`: the ring of a running server, live in the terminal. It reads GET /v1/ring and GET /metrics."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import TYPE_CHECKING, Annotated

import typer

from engine.errors import KVRingError
from kvring_cli import console
from kvring_cli.frame import Look, draw

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH = 120  # of a frame that goes to a file or a pipe
TIMEOUT = 5.0  # seconds


class NotReady(KVRingError):
    """It answers, but not with a ring: loading, or its engine is gone."""


def top(
    url: Annotated[str, typer.Option("--url", help="Where kvring serve listens.")] = "http://127.0.0.1:8000",
    *,
    api_key: Annotated[
        str | None, typer.Option("--api-key", help="The server's key. Switch: KVRING_API_KEY.", show_default=False)
    ] = None,
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit; so it is in a pipe, too.")] = False,
) -> None:
    """Watch a server: how full pool and host are, what runs, which pages are where and why. Ctrl-C ends it."""
    from rich.console import Console
    from rich.live import Live

    source = Source(url, api_key or os.environ.get("KVRING_API_KEY"))
    tty = sys.stdout.isatty()
    out = Console(highlight=False, width=None if tty else WIDTH)
    if once or not tty:
        out.print(source.frame())
        return
    try:
        with Live(_frame(source), console=out, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                live.update(_frame(source, patient=True), refresh=True)
    except KeyboardInterrupt:
        return


def _frame(source: Source, patient: bool = False) -> RenderableType:
    """The frame; once it runs, what goes wrong is shown in its place and looked at again."""
    from rich.text import Text

    try:
        return source.frame()
    except KVRingError as error:
        if not patient and not isinstance(error, NotReady):
            raise
        return Text(f"{source.url} | {error.message}", "yellow")


class Source:
    """One server."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url.rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise console.BadUsage(f"'{url}' is not an address", "--url http://127.0.0.1:8000")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open  # loopback needs no proxy

    def frame(self) -> RenderableType:
        """What it shows now. Raises KVRingError with what would mend it; NotReady where waiting would."""
        ring, metrics = self._get("/v1/ring"), self._get("/metrics")
        try:
            return draw(Look(self.url, json.loads(ring), read_metrics(metrics)))
        except (ValueError, KeyError, TypeError):
            raise self._stranger() from None

    def _get(self, path: str) -> str:
        try:
            with self._open(urllib.request.Request(self.url + path, headers=self._headers), timeout=TIMEOUT) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            raise self._refusal(error) from None
        except (OSError, ValueError, HTTPException) as error:  # ValueError: an address that can't be read
            reason = getattr(error, "reason", error)
            raise KVRingError(
                f"nothing answers at {self.url}: {reason}", "start one: kvring serve MODEL; or name another with --url"
            ) from None

    def _refusal(self, error: urllib.error.HTTPError) -> KVRingError:
        if error.code == 401:
            return KVRingError(f"{self.url} wants its API key", "--api-key KEY")
        if error.code == 503:
            return NotReady(f"{self.url} can't answer yet: {_message(error)}", "try again; GET /health tells when")
        return self._stranger()

    def _stranger(self) -> KVRingError:
        return KVRingError(f"what answers at {self.url} is not kvring serve", "another address for --url")


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return json.loads(error.read())["error"]["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"HTTP {error.code}"


def read_metrics(text: str) -> dict[str, float]:
    """Prometheus text: the sum over labels of each name."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            values[name] = values.get(name, 0.0) + float(value)
    return values
