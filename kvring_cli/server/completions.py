"""POST /v1/completions, in OpenAI's older form: a raw text goes on, without the chat template."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from kvring_cli.server import report, sse
from kvring_cli.server.ask import Answer, Ask, open_answer, start
from kvring_cli.server.errors import as_api_error, invalid
from kvring_cli.server.fields import OpenAIBody, described, read
from kvring_cli.server.frame import Frame
from kvring_cli.server.logprobs import text_logprobs
from kvring_cli.server.service import Service
from kvring_cli.server.stream import unless_gone

router = APIRouter()


class TextBody(OpenAIBody):
    prompt: str | list[str]
    logprobs: int | None = Field(None, ge=0, le=20)

    def text(self) -> str:
        if isinstance(self.prompt, str):
            return self.prompt
        if len(self.prompt) != 1:
            raise invalid(f"prompt is a list of {len(self.prompt)}; send one text a request", "prompt")
        return self.prompt[0]


@router.post("/v1/completions", openapi_extra=described(TextBody))
async def completions(request: Request) -> Response:
    service: Service = request.app.state.service
    arrived = time.perf_counter()
    body = await read(request, TextBody, service.settings.max_body)
    service.check_model(body.model)
    sampling = body.sampling(stop=body.stops(), logprobs=body.logprobs)
    ask = Ask("openai-text", body.text(), sampling, body.recall(), arrived=arrived)
    frame = Frame(service.model_id, "text_completion", "cmpl")
    if body.stream:
        answer = await unless_gone(request, open_answer(service, ask))
        return sse.Events(answer, _events(answer, frame, body)) if answer else sse.GONE
    whole = await unless_gone(request, _whole(service, ask, frame))
    return JSONResponse(whole) if whole else sse.GONE


async def _whole(service: Service, ask: Ask, frame: Frame) -> dict[str, Any]:
    texts: list[str] = []
    async with await start(service, ask) as answer:
        await answer.begin()
        async for part in answer.parts():
            if part is not None:
                texts.append(part.text)
    choice: dict[str, Any] = {
        "index": 0,
        "text": "".join(texts),
        "finish_reason": answer.finish,
        "logprobs": None if ask.sampling.logprobs is None else text_logprobs(answer, 0),
    }
    numbers = {"usage": report.usage(answer), "timings": report.timings(answer), "kvring": report.kvring(answer)}
    return {**frame.head, "choices": [choice], **numbers}


async def _events(answer: Answer, frame: Frame, body: TextBody) -> AsyncIterator[bytes]:
    offset = 0
    usage_null = {"usage": None} if body.usage_in_stream else {}

    def choice(text: str, finish: str | None = None) -> bytes:
        logprobs = None if body.logprobs is None else text_logprobs(answer, offset)
        one = {"index": 0, "text": text, "finish_reason": finish, "logprobs": logprobs}
        more = {"timings": report.timings(answer), "kvring": report.kvring(answer)} if finish else {}
        return sse.event({**frame.head, "choices": [one], **usage_null, **more})

    try:
        async for part in answer.parts():
            if part is None:
                yield sse.keep_alive(answer)
            else:
                yield choice(part.text)
                offset += len(part.text)
        yield choice("", answer.finish)
        if body.usage_in_stream:
            yield sse.event({**frame.head, "choices": [], "usage": report.usage(answer)})
        yield sse.DONE
    except Exception as failure:
        answer.error = failure
        yield sse.event(as_api_error(failure).body(anthropic=False))
