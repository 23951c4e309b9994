"""Chat messages to token ids through the model's own template, so that no message can forge a turn.

Before the template runs, every special-token string inside the messages is replaced by a stand-in that holds its
number between two private-use characters. The template's logic (trimming, tests, slices) sees ordinary text.
Afterwards the rendered text is cut at the stand-ins: the pieces between are encoded with special tokens, which are now
the template's own only, and each stand-in is encoded as the plain text that the user wrote. A conversation without
such strings is encoded in one piece, so its ids are those of Hugging Face's apply_chat_template.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import ModelError, RequestError
from engine.text.spans import Spans
from engine.text.tokenizer import Tokenizer
from engine.text.tools import spell_tools

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Encoded:
    """A rendered conversation. spans[i] = the tokens [start, end) that hold message i's content; `tools`: those that
    hold the tool definitions, (n, n) without any.

    A token that covers a piece of the content counts as holding it. A content that the template left out, or changed
    beyond recognition, has the empty span (n, n) at the end.
    """

    ids: list[int]
    spans: list[tuple[int, int]]
    tools: tuple[int, int]


class ChatTemplate:
    """A model's Jinja template, in a sandbox: it comes with the model, so it is not to be trusted."""

    def __init__(self, template: str, bos: str = "", eos: str = "") -> None:
        """`bos` and `eos` are the tokens' strings. Raises ModelError for a template that isn't one."""
        self.source = template
        self._strings = {"bos_token": bos, "eos_token": eos}
        try:
            self._template = _environment().from_string(template)
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template is damaged: {error}", "download the model again") from None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The text of a conversation. `kwargs` are the template's own switches, such as enable_thinking."""
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return self._template.render(
                **{**self._strings, **kwargs},
                messages=plain,
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise RequestError(
                f"the model's chat template refused these messages: {error}",
                "templates often want roles to alternate, begin with user, and content to be text",
            ) from None

    def encode(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> Encoded:
        """Token ids of a conversation and where each message's content lies in them."""
        messages = [_checked(index, message) for index, message in enumerate(messages)]
        if not messages:
            raise RequestError("the conversation is empty", "send at least one message")
        mark = _unused_characters(json.dumps([list(messages), list(tools or [])], ensure_ascii=False, default=str))
        specials = list(tokenizer.special)
        number = {string: str(index) for index, string in enumerate(specials)}

        def neutral(value: Any) -> Any:
            if isinstance(value, str):
                return tokenizer.special_pattern.sub(lambda m: f"{mark[0]}{number[m[0]]}{mark[1]}", value)
            if isinstance(value, Mapping):
                return {neutral(key): neutral(item) for key, item in value.items()}
            return [neutral(item) for item in value] if isinstance(value, list | tuple) else value

        safe = [neutral(message) for message in messages]
        safe_tools = [neutral(tool) for tool in tools or ()]
        arguments = {"tools": safe_tools, "add_generation_prompt": add_generation_prompt, **neutral(kwargs)}
        rendered = self.render(safe, **arguments)
        contents = [_text_of(message) for message in safe]
        frames = [{**message, "content": f"{mark[2]}{index}{mark[2]}"} for index, message in enumerate(safe)]
        try:
            skeleton = self.render(frames, **arguments)
        except RequestError:
            skeleton = ""
        places = _locate(rendered, contents, skeleton, mark[2])
        places.append(self._place_of_tools(rendered, safe, safe_tools, arguments))
        tokens = _encode_around(rendered, mark, specials, tokenizer)
        ids, starts, ends = tokens.ids.tolist(), tokens.starts, tokens.ends
        spans = [(bisect_right(ends, start), bisect_left(starts, end)) for start, end in places]
        spans = [(start, end) if start < end else (len(ids), len(ids)) for start, end in spans]
        return Encoded(ids, spans[:-1], spans[-1])

    def _place_of_tools(
        self, rendered: str, messages: list[Message], tools: list[Any], arguments: Mapping[str, Any]
    ) -> tuple[int, int]:
        """The characters that are there because of the tools: what differs without them, or their spelling as text."""
        if not tools:
            return len(rendered), len(rendered)
        try:
            bare = self.render(messages, **{**arguments, "tools": None})
        except RequestError:
            return len(rendered), len(rendered)
        if bare == rendered:
            spelled = spell_tools(tools)
            start = rendered.find(spelled)
            return (start, start + len(spelled)) if start >= 0 else (len(rendered), len(rendered))
        start = _shared(bare, rendered)
        end = _shared(bare[start:][::-1], rendered[start:][::-1])
        return start, len(rendered) - end


def _shared(first: str, second: str) -> int:
    """Characters that both begin with."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _encode_around(rendered: str, mark: str, specials: list[str], tokenizer: Tokenizer) -> Spans:
    """Tokens, with their characters in `rendered`; a special's string that a person wrote is text."""
    parts: list[Spans] = []
    cursor = 0
    for match in re.finditer(f"{mark[0]}([0-9]+){mark[1]}", rendered):
        if cursor < match.start():
            parts.append(tokenizer.encode_spans(rendered[cursor : match.start()], specials=True).moved(cursor))
        written = tokenizer.encode_spans(specials[int(match[1])], specials=False).ids
        parts.append(Spans.of(written, [match.span()] * len(written)))
        cursor = match.end()
    if cursor < len(rendered) or not rendered:
        parts.append(tokenizer.encode_spans(rendered[cursor:], specials=True).moved(cursor))
    return Spans.joined(parts)


def _locate(rendered: str, contents: list[str], skeleton: str, mark: str) -> list[tuple[int, int]]:
    """Each content's characters [start, end) in `rendered`; (len, len) where it can't be told.

    The skeleton is the same conversation with a numbered frame for each content. If its fixed parts, with the contents
    between (as they are, or trimmed), give back `rendered`, the places are exact. Otherwise (a template that rewrites
    content) the contents are searched for in order.
    """
    nowhere = (len(rendered), len(rendered))
    parts = re.split(f"{mark}([0-9]+){mark}", skeleton)
    places = [nowhere] * len(contents)
    cursor = 0
    for fixed, index in zip(parts[::2], [*map(int, parts[1::2]), None], strict=True):
        if not rendered.startswith(fixed, cursor):
            break
        cursor += len(fixed)
        if index is None:
            if cursor == len(rendered):
                return places
            break
        content = contents[index]
        variant = next((c for c in (content, content.strip()) if rendered.startswith(c, cursor)), None)
        if variant is None:
            break
        places[index] = (cursor, cursor + len(variant))
        cursor += len(variant)
    places, cursor = [], 0
    for content in contents:
        needle = content.strip()
        start = rendered.find(needle, cursor) if needle else -1
        if start < 0:
            places.append(nowhere)
            continue
        cursor = start + len(needle)
        places.append((start, cursor))
    return places


def _checked(index: int, message: Message) -> Message:
    """The message with a content given as a list of text parts joined, since most templates know text only."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"message {index} has no role", 'write it as {"role": "user", "content": "..."}')
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    parts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
    if not all(isinstance(part, str) for part in parts):
        raise RequestError(
            f"message {index} holds something other than text", "send text only: this engine has no eyes"
        )
    return {**message, "content": "\n".join(parts)}


def _text_of(message: Message) -> str:
    """A message's content; empty where it has none, as a tool call may."""
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _unused_characters(text: str) -> str:
    """Three private-use characters that the conversation doesn't contain."""
    found = []
    for code in range(0xF0000, 0xFFFFE):
        if chr(code) not in text:
            found.append(chr(code))
            if len(found) == 3:
                break
    return "".join(found)


class _Generation(Extension):
    """`{% generation %}` marks for training which tokens the model wrote; here it is its body and nothing more."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """As Hugging Face renders chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **kwargs: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **kwargs)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return datetime.now().strftime(pattern)

    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment
