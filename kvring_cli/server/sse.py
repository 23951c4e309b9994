"""Server-sent events: JSON that is never cut inside a character, and signs of life while nothing happens."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from fastapi.responses import Response, StreamingResponse

if TYPE_CHECKING:
    from kvring_cli.server.ask import Answer

DONE = b"data: [DONE]\n\n"
GONE = Response(status_code=499)
"""For a client that left; nobody reads it."""


def event(value: Any, name: str | None = None) -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def keep_alive(answer: Answer) -> bytes:
    """A comment: `: keep-alive processed/total` in tokens of the prompt."""
    done = answer.progress.done if answer.progress else 0
    return f": keep-alive {done}/{len(answer.prepared.tokens)}\n\n".encode()


class Events(StreamingResponse):
    """Streams `events`, and closes `answer` when they end, fail, or the client goes away, be it before the first."""

    def __init__(self, answer: Answer, events: AsyncIterator[bytes]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream; charset=utf-8", headers=headers)
        self._answer = answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._answer.close(self._answer.error)
