"""POST /tokenize: the tokens of a text, or of messages in the model's template."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict

from kvring_cli.server.errors import invalid
from kvring_cli.server.fields import described, read
from kvring_cli.server.length import check_length
from kvring_cli.server.messages import from_openai
from kvring_cli.server.service import Service

router = APIRouter()


class TokenizeBody(BaseModel):
    """One of them. `content` is llama.cpp's name, `prompt` and `messages` are vLLM's."""

    model_config = ConfigDict(strict=True, extra="ignore")
    content: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


@router.post("/tokenize", openapi_extra=described(TokenizeBody))
async def tokenize(request: Request) -> dict[str, Any]:
    service: Service = request.app.state.service
    body = await read(request, TokenizeBody)
    model = service.engine.model
    text = body.prompt if body.content is None else body.content
    await asyncio.to_thread(check_length, service.engine, [text, body.messages])
    if text is not None:
        tokens = await asyncio.to_thread(model.tokenizer.encode, text)
    elif body.messages and model.chat is not None:
        messages = from_openai(body.messages, [], service.engine)
        tokens = (await asyncio.to_thread(model.chat.encode, messages, model.tokenizer)).ids
    else:
        raise invalid("give content, prompt or messages")
    return {"tokens": tokens, "count": len(tokens), "max_model_len": service.engine.capacity.context}
