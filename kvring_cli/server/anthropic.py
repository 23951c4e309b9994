"""POST /v1/messages and /v1/messages/count_tokens, in Anthropic's form."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from kvring_cli.server import report, sse
from kvring_cli.server.ask import Answer, Ask, Part
from kvring_cli.server.blocks import from_anthropic, thinking_of, tools_of
from kvring_cli.server.fields import Body, described, listing, read, stop_strings
from kvring_cli.server.length import check_length
from kvring_cli.server.reply import reply
from kvring_cli.server.service import Service

router = APIRouter()


class CountBody(Body):
    messages: list[dict[str, Any]] = Field(min_length=1, json_schema_extra=listing("user", "assistant"))
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None

    def prompt(self, service: Service) -> tuple[list[dict[str, Any]], dict[str, Any], frozenset[str], int | None]:
        """Messages, what the template is told, the tools' names, and the thinking budget."""
        tools, names = tools_of(self.tools, self.tool_choice)
        budget, template = thinking_of(self.thinking)
        messages = from_anthropic(self.system, self.messages, tools, service.engine)
        return messages, {**template, **({"tools": tools} if tools else {})}, names, budget


class MessagesBody(CountBody):
    max_tokens: int = Field(ge=1, le=1 << 30)
    stop_sequences: list[str] | None = None

    def stops(self) -> tuple[str, ...]:
        return stop_strings("stop_sequences", self.stop_sequences)


@router.post("/v1/messages/count_tokens", openapi_extra=described(CountBody))
async def count_tokens(request: Request) -> dict[str, int]:
    service: Service = request.app.state.service
    body = await read(request, CountBody)
    service.check_model(body.model)
    messages, template, _, _ = body.prompt(service)
    await asyncio.to_thread(check_length, service.engine, [messages, template])
    return {"input_tokens": await asyncio.to_thread(service.engine.count_tokens, messages, **template)}


@router.post("/v1/messages", openapi_extra=described(MessagesBody))
async def messages(request: Request) -> Response:
    service: Service = request.app.state.service
    arrived = time.perf_counter()
    body = await read(request, MessagesBody)
    service.check_model(body.model)
    prompt, template, names, budget = body.prompt(service)
    sampling = body.sampling(stop=body.stops())
    one_call = (body.tool_choice or {}).get("disable_parallel_tool_use") is True
    ask = Ask("anthropic", prompt, sampling, body.recall(), template, names, one_call, budget, arrived)
    model = service.model_id
    return await reply(
        request, ask, body.stream, lambda answer: _whole(answer, model), lambda answer: _events(answer, model)
    )


def _head(model: str, content: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


async def _whole(answer: Answer, model: str) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    async for part in answer.parts():
        if part is None:
            continue
        if part.kind == "call" or not blocks or blocks[-1]["type"] != _TYPES[part.kind]:
            blocks.append(_block(part))
        if part.kind == "call":
            blocks[-1]["input"] = part.call.arguments
        else:
            blocks[-1]["text" if part.kind == "content" else "thinking"] += part.text
    head = _head(model, blocks or [{"type": "text", "text": ""}], _usage(answer))
    return {**head, **_ending(answer), **report.beside(answer)}


async def _events(answer: Answer, model: str) -> AsyncIterator[bytes]:
    def say(kind: str, **more: Any) -> bytes:
        return sse.event({"type": kind, **more}, kind)

    open_kind, index = None, -1
    yield say("message_start", message=_head(model, [], _usage(answer)))
    async for part in answer.parts():
        if part is None:
            yield sse.keep_alive(answer)
            continue
        if part.kind == "call" or part.kind != open_kind:
            if open_kind is not None:
                yield say("content_block_stop", index=index)
            open_kind, index = part.kind, index + 1
            yield say("content_block_start", index=index, content_block=_block(part))
        yield say("content_block_delta", index=index, delta=_delta(part))
    if open_kind is None:
        index = 0
        yield say("content_block_start", index=0, content_block={"type": "text", "text": ""})
    yield say("content_block_stop", index=index)
    yield say("message_delta", delta=_ending(answer), usage=_usage(answer), **report.beside(answer))
    yield say("message_stop")


_TYPES = {"content": "text", "reasoning": "thinking", "call": "tool_use"}


def _block(part: Part) -> dict[str, Any]:
    """Empty, as a stream begins it."""
    if part.call is not None:
        return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": part.call.name, "input": {}}
    return (
        {"type": "text", "text": ""}
        if part.kind == "content"
        else {"type": "thinking", "thinking": "", "signature": ""}
    )


def _delta(part: Part) -> dict[str, Any]:
    if part.call is not None:
        return {"type": "input_json_delta", "partial_json": json.dumps(part.call.arguments, ensure_ascii=False)}
    if part.kind == "content":
        return {"type": "text_delta", "text": part.text}
    return {"type": "thinking_delta", "thinking": part.text}


def _ending(answer: Answer) -> dict[str, Any]:
    stop_string = answer.stream.job.session.stop_string
    reason = {"stop": "stop_sequence" if stop_string else "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    return {"stop_reason": reason[answer.finish], "stop_sequence": stop_string}


def _usage(answer: Answer) -> dict[str, int]:
    """Anthropic counts what was read from the cache apart from input_tokens."""
    job = answer.stream.job
    cached = job.session.cached if job.session else 0  # nothing is known of it while it waits
    return {
        "input_tokens": len(answer.prepared.tokens) - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": answer.result.usage.generated if answer.result else job.generated,
    }
