"""POST /v1/chat/completions, in OpenAI's form."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from engine.text.tools import Call
from kvring_cli.server import report, sse
from kvring_cli.server.ask import Answer, Ask
from kvring_cli.server.fields import OpenAIBody, described, listing, read
from kvring_cli.server.frame import Frame
from kvring_cli.server.logprobs import chat_logprobs
from kvring_cli.server.messages import ROLES, from_openai, thinking_of, tools_of
from kvring_cli.server.reply import reply
from kvring_cli.server.service import Service

router = APIRouter()


class ChatBody(OpenAIBody):
    messages: list[dict[str, Any]] = Field(min_length=1, json_schema_extra=listing(*ROLES))
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 30)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    def longest(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


@router.post("/v1/chat/completions", openapi_extra=described(ChatBody))
async def chat_completions(request: Request) -> Response:
    service: Service = request.app.state.service
    arrived = time.perf_counter()
    body = await read(request, ChatBody)
    service.check_model(body.model)
    tools, names = tools_of(body.tools, body.tool_choice)
    thinking, template = thinking_of(body.chat_template_kwargs, body.reasoning_effort)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    ask = Ask(
        "openai-chat",
        from_openai(body.messages, tools, service.engine),
        body.sampling(stop=body.stops(), logprobs=logprobs),
        body.recall(),
        {**template, **({"tools": tools} if tools else {})},
        names,
        body.parallel_tool_calls is False,
        thinking,
        arrived,
    )
    frame = Frame(service.model_id, "chat.completion", "chatcmpl")
    return await reply(
        request, ask, body.stream, lambda answer: _whole(answer, frame), lambda answer: _events(answer, frame, body)
    )


async def _whole(answer: Answer, frame: Frame) -> dict[str, Any]:
    texts: dict[str, list[str]] = {"content": [], "reasoning": []}
    calls: list[dict[str, Any]] = []
    async for part in answer.parts():
        if part is not None and part.call is not None:
            calls.append(_call(part.call, len(calls), whole=True))
        elif part is not None:
            texts[part.kind].append(part.text)
    text = "".join(texts["content"])
    message: dict[str, Any] = {"role": "assistant", "content": None if calls and not text else text}
    if texts["reasoning"]:
        message["reasoning_content"] = "".join(texts["reasoning"])
    if calls:
        message["tool_calls"] = calls
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": answer.finish, "logprobs": None}
    if answer.ask.sampling.logprobs is not None:
        choice["logprobs"] = chat_logprobs(answer)
    return {**frame.head, "choices": [choice], "usage": report.usage(answer), **report.beside(answer)}


async def _events(answer: Answer, frame: Frame, body: ChatBody) -> AsyncIterator[bytes]:
    calls = 0
    usage_null = {"usage": None} if body.usage_in_stream else {}

    def choice(delta: dict[str, Any], finish: str | None = None) -> bytes:
        one: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        if body.logprobs and ("content" in delta or finish):
            one["logprobs"] = chat_logprobs(answer)
        more = report.beside(answer) if finish else {}
        return frame.chunk([one], **usage_null, **more)

    yield choice({"role": "assistant"})
    async for part in answer.parts():
        if part is None:
            yield sse.keep_alive(answer)
        elif part.call is not None:
            yield choice({"tool_calls": [_call(part.call, calls, whole=False)]})
            calls += 1
        else:
            yield choice({"reasoning_content" if part.kind == "reasoning" else "content": part.text})
    yield choice({}, answer.finish)
    if body.usage_in_stream:
        yield frame.chunk([], usage=report.usage(answer))
    yield sse.DONE


def _call(call: Call, index: int, whole: bool) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    place = {} if whole else {"index": index}
    return {**place, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
