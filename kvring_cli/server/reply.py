"""An answer as HTTP, the same for every route: whole as JSON, or its events as they come; in either, its failure."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from kvring_cli.server import sse
from kvring_cli.server.ask import Answer, Ask, open_answer, start
from kvring_cli.server.errors import as_api_error, speaks_anthropic
from kvring_cli.server.service import Service
from kvring_cli.server.stream import unless_gone

Whole = Callable[[Answer], Awaitable[dict[str, Any]]]
Events = Callable[[Answer], AsyncIterator[bytes]]


async def reply(request: Request, ask: Ask, stream: bool | None, whole: Whole, events: Events) -> Response:
    """Both functions read `Answer.parts` to its end. A client that leaves takes its request with it."""
    service: Service = request.app.state.service
    anthropic = speaks_anthropic(request.url.path)
    work = _streamed(service, ask, events, anthropic) if stream else _whole(service, ask, whole)
    return await unless_gone(request, work) or sse.GONE


async def _whole(service: Service, ask: Ask, whole: Whole) -> Response:
    async with await start(service, ask) as answer:
        return JSONResponse(await whole(answer))


async def _streamed(service: Service, ask: Ask, events: Events, anthropic: bool) -> Response:
    answer = await open_answer(service, ask)
    return sse.Events(answer, _until_failure(answer, events, anthropic))


async def _until_failure(answer: Answer, events: Events, anthropic: bool) -> AsyncIterator[bytes]:
    """A failure in mid-stream is one error event and the end."""
    try:
        async for event in events(answer):
            yield event
    except Exception as failure:
        answer.error = failure
        yield sse.event(as_api_error(failure).body(anthropic), "error" if anthropic else None)
