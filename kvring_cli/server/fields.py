"""Request bodies: JSON that is JSON, fields of the right type, and nothing known that would silently not happen."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.config import RecallParams, SamplingParams
from kvring_cli.server.errors import APIError, invalid

Shape = TypeVar("Shape", bound=BaseModel)


class Extension(BaseModel):
    """`kvring`: how this request sees its pages; left out, as the server was started."""

    model_config = ConfigDict(strict=True, extra="ignore")
    prefill: str | None = None
    decode: str | None = None
    scorer: str | None = None
    explain: bool = False

    def params(self) -> RecallParams:
        return RecallParams(prefill=self.prefill, decode=self.decode, scorer=self.scorer, explain=self.explain)


class Body(BaseModel):
    """What every request for tokens may carry. Unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1, le=1 << 30)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=1 << 30)
    stream: bool | None = None
    kvring: Extension | None = None

    def longest(self) -> int | None:
        return self.max_tokens

    def sampling(self, **more: Any) -> SamplingParams:
        asked = {name: getattr(self, name, None) for name in _DRAWN}
        asked["top_k"] = max(0, self.top_k or 0)
        given = {name: value for name, value in {**asked, **more}.items() if value is not None}
        return SamplingParams(max_tokens=self.longest(), **given)

    def recall(self) -> RecallParams:
        return (self.kvring or Extension()).params()


_DRAWN = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "ignore_eos",
)


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    include_usage: bool | None = None


class OpenAIBody(Body):
    """What chat and plain completions share."""

    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    stream_options: StreamOptions | None = None

    def stops(self) -> tuple[str, ...]:
        return stop_strings("stop", [self.stop] if isinstance(self.stop, str) else self.stop)

    @property
    def usage_in_stream(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "store": (False,),
    "web_search_options": (),
    "use_beam_search": (False,),
    "min_tokens": (0,),
    "prompt_logprobs": (0,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "json_schema": (),
    "grammar": ("",),
    "typical_p": (1, 1.0),
    "mirostat": (0,),
    "repeat_penalty": (1, 1.0),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "truncate_prompt_tokens": (),
    "chat_template": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "output_format": (),
    "container": (),
    "mcp_servers": ([],),
}
"""Known fields that would change the answer and aren't supported, and the values that ask for nothing."""


def described(shape: type[BaseModel]) -> dict[str, Any]:
    """A body's schema for the OpenAPI document."""
    schema = shape.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _inline(schema)}}}}


def _inline(schema: dict[str, Any]) -> dict[str, Any]:
    """Without references, which would need a place of their own."""
    parts = schema.pop("$defs", {})

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            if "$ref" in value:
                return walk(parts[value["$ref"].rpartition("/")[2]])
            return {key: walk(item) for key, item in value.items()}
        return [walk(item) for item in value] if isinstance(value, list) else value

    return walk(schema)


def listing(*roles: str) -> dict[str, Any]:
    """What messages look like, for the OpenAPI document; what they may be is checked where they are read."""
    content = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
    properties = {"role": {"enum": list(roles)}, "content": content}
    return {"items": {"type": "object", "properties": properties, "required": ["role", "content"]}}


def stop_strings(name: str, stops: list[str] | None) -> tuple[str, ...]:
    """What ends an answer, as the field `name` says it."""
    stops = stops or []
    if len(stops) > 4:
        raise invalid(f"{name} has {len(stops)} strings; 4 is the most", name)
    if not all(stops):
        raise invalid(f"{name} holds an empty string, which would end every answer", name)
    return tuple(stops)


async def read(request: Request, shape: type[Shape]) -> Shape:
    """The checked body; APIError naming the field that is wrong."""
    raw = parse(await read_bytes(request, request.app.state.service.settings.max_body))
    if not isinstance(raw, dict):
        raise invalid("the body must be a JSON object")
    for name, neutral in UNSUPPORTED.items():
        value = raw.get(name)
        if value is not None and not any(value == one and type(value) is type(one) for one in neutral):
            raise APIError(400, "unsupported_field", f"'{name}' is not supported by this server: leave it out", name)
    return check(raw, shape)


def check(raw: Mapping[str, Any], shape: type[Shape]) -> Shape:
    try:
        return shape.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"] if isinstance(part, str | int)) or None
        raise invalid(f"{param or 'the body'}: {first['msg']}", param) from None


def parse(body: bytes) -> Any:
    """Strict JSON: UTF-8, no NaN or Infinity, no half of a surrogate pair."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant, parse_float=_finite)
        if b"\\u" in body:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise APIError(400, "invalid_json", f"the body is not UTF-8: byte {error.start} is wrong") from None
    except UnicodeEncodeError:
        raise APIError(400, "invalid_json", "the body holds half of a surrogate pair, which is no character") from None
    except RecursionError:
        raise APIError(400, "invalid_json", "the body is nested too deeply") from None
    except ValueError as error:
        raise APIError(400, "invalid_json", f"the body is not JSON: {error}") from None
    return value


async def read_bytes(request: Request, limit: int) -> bytes:
    """The body, at most `limit` bytes of it; what is over is read no further."""
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > limit:
            raise APIError(413, "request_too_large", f"the body is larger than {limit:,} bytes")
        pieces.append(piece)
    return b"".join(pieces)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is too large a number")
    return value
