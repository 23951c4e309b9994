"""Server-sent events: JSON that is never cut inside a character, and signs of life while nothing happens."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from fastapi.responses import StreamingResponse

if TYPE_CHECKING:
    from kvring_cli.server.ask import Answer

DONE = b"data: [DONE]\n\n"


def event(value: Any, name: str | None = None) -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def keep_alive(answer: Answer) -> bytes:
    """A comment: `: keep-alive processed/total` in tokens of the prompt."""
    done = answer.progress.done if answer.progress else 0
    return f": keep-alive {done}/{len(answer.prepared.tokens)}\n\n".encode()


def respond(events: AsyncIterator[bytes]) -> StreamingResponse:
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream; charset=utf-8", headers=headers)
