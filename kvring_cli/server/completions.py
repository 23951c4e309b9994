"""POST /v1/completions, in OpenAI's older form: a raw text goes on, without the chat template."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from kvring_cli.server import report, sse
from kvring_cli.server.ask import Answer, Ask
from kvring_cli.server.errors import invalid
from kvring_cli.server.fields import OpenAIBody, described, read
from kvring_cli.server.frame import Frame
from kvring_cli.server.logprobs import text_logprobs
from kvring_cli.server.reply import reply
from kvring_cli.server.service import Service

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
    body = await read(request, TextBody)
    service.check_model(body.model)
    sampling = body.sampling(stop=body.stops(), logprobs=body.logprobs)
    ask = Ask("openai-text", body.text(), sampling, body.recall(), arrived=arrived)
    frame = Frame(service.model_id, "text_completion", "cmpl")
    return await reply(
        request, ask, body.stream, lambda answer: _whole(answer, frame), lambda answer: _events(answer, frame, body)
    )


async def _whole(answer: Answer, frame: Frame) -> dict[str, Any]:
    texts = [part.text async for part in answer.parts() if part is not None]
    choice: dict[str, Any] = {
        "index": 0,
        "text": "".join(texts),
        "finish_reason": answer.finish,
        "logprobs": None if answer.ask.sampling.logprobs is None else text_logprobs(answer, 0),
    }
    return {**frame.head, "choices": [choice], "usage": report.usage(answer), **report.beside(answer)}


async def _events(answer: Answer, frame: Frame, body: TextBody) -> AsyncIterator[bytes]:
    offset = 0
    usage_null = {"usage": None} if body.usage_in_stream else {}

    def choice(text: str, finish: str | None = None) -> bytes:
        logprobs = None if body.logprobs is None else text_logprobs(answer, offset)
        one = {"index": 0, "text": text, "finish_reason": finish, "logprobs": logprobs}
        more = report.beside(answer) if finish else {}
        return sse.event({**frame.head, "choices": [one], **usage_null, **more})

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
