"""What a refused client is still sending is read and dropped before it gets its answer.

A connection that is closed with bytes unread is reset, and many clients then report the reset and never read the
answer: with 4 MiB unread Python's urllib saw no 401 and no 413. uvicorn reads on by itself only where the client keeps
its connection; urllib doesn't.
"""

from __future__ import annotations

import asyncio
from typing import Any

LARGEST = 256 << 20
"""Bytes of a body that are read away. Who announces more is answered at once."""
SECONDS = 10.0


class Unread:
    """A request's channels; `send` reads the rest of the body away before it begins an answer of 400 or more."""

    def __init__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        size = headers.get(b"content-length", b"0")
        self._left = LARGEST if size.isdigit() and int(size) <= LARGEST else 0
        if b"expect" in headers or (b"content-length" not in headers and b"transfer-encoding" not in headers):
            self._left = 0  # it waits for leave to send, or sends nothing
        self._receive, self._send = receive, send

    async def receive(self) -> Any:
        message = await self._receive()
        self._left = max(0, self._left - len(message.get("body", b""))) if message.get("more_body") else 0
        return message

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            try:
                await asyncio.wait_for(self._drop(), SECONDS)
            except asyncio.TimeoutError:  # it sends too slowly to be waited for
                self._left = 0
        await self._send(message)

    async def _drop(self) -> None:
        while self._left:
            await self.receive()
