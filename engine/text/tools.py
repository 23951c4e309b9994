"""Tool calls in what a model wrote: Hermes and Qwen tags, Qwen-coder XML, Llama-3 and Mistral JSON.

What is not a whole call of a tool that was offered stays text, as it was written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
INSTRUCTIONS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{{"name": <function-name>, "arguments": <args-json-object>}}\n'
    "</tool_call>"
)
"""Hermes' wording, for a model whose template has no place for tools."""


def spell_tools(tools: Iterable[Mapping[str, Any]]) -> str:
    """The definitions as text, one a line."""
    return INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


@dataclass(frozen=True)
class Call:
    name: str
    arguments: Mapping[str, Any]


class CallReader:
    """Feed content as it comes: text and calls come out in order. Text that may be a call is held until it's known."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._held = ""
        self._begun = False
        self._after = False  # a call ended here: the line end behind it belongs to it
        self._whole = False  # the answer began as bare JSON: only its end tells

    def push(self, text: str) -> list[str | Call]:
        self._held += text
        if self._after:
            self._held = self._held.lstrip("\n")
            self._after = not self._held
        out: list[str | Call] = []
        if not self._begun and self._held.strip():
            self._begun = True
            self._whole = self._held.lstrip()[0] in "{["
        while not self._whole and self._held:
            at = self._held.find(OPEN)
            if at < 0:
                keep = _overlap(self._held)
                self._give(out, len(self._held) - keep)
                break
            end = self._held.find(CLOSE, at)
            self._give(out, at)
            if end < 0:
                break
            end += len(CLOSE) - at
            block = self._held[:end]
            call = _tagged(block[len(OPEN) : -len(CLOSE)], self._names)
            out.append(block if call is None else call)
            self._held = self._held[end:] if call is None else self._held[end:].lstrip("\n")
            self._after = call is not None and not self._held
        return out

    def finish(self) -> list[str | Call]:
        """What was held back when the answer ended; a last call without its closing tag counts if it is whole."""
        text, self._held = self._held, ""
        if self._whole:
            return list(_bare(text, self._names) or [text])
        if text.startswith(OPEN):
            call = _tagged(text[len(OPEN) :], self._names)
            return [text if call is None else call]
        return [text] if text else []

    def _give(self, out: list[str | Call], end: int) -> None:
        if end > 0:
            out.append(self._held[:end])
            self._held = self._held[end:]


def parse_calls(text: str, names: Collection[str]) -> tuple[str, list[Call]]:
    """A whole answer's text, calls taken out, and its calls."""
    reader = CallReader(names)
    parts = [*reader.push(text), *reader.finish()]
    calls = [part for part in parts if isinstance(part, Call)]
    return "".join(part for part in parts if isinstance(part, str)), calls


def _overlap(text: str) -> int:
    return next((n for n in range(min(len(text), len(OPEN) - 1), 0, -1) if text.endswith(OPEN[:n])), 0)


def _tagged(inner: str, names: frozenset[str]) -> Call | None:
    inner = inner.strip()
    function = re.fullmatch(r"<function=([^>\s]+)>(.*?)(?:</function>)?", inner, re.DOTALL)
    if function:
        values = re.findall(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", function[2], re.DOTALL)
        return Call(function[1], {key: _literal(value) for key, value in values}) if function[1] in names else None
    return _call(_json(inner), names)


def _bare(text: str, names: frozenset[str]) -> list[Call]:
    """All of `text` as calls: one object, a list of them, or several with `;` or line ends between; else nothing."""
    decoder, calls, rest = json.JSONDecoder(), [], text.strip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return []
        for item in value if isinstance(value, list) else [value]:
            call = _call(item, names)
            if call is None:
                return []
            calls.append(call)
        rest = rest[end:].lstrip(" \n\t;")
    return calls


def _call(value: Any, names: frozenset[str]) -> Call | None:
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json(arguments)
    return Call(value["name"], arguments) if isinstance(arguments, dict) else None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _literal(text: str) -> Any:
    """A parameter's value: JSON where it is some, else the text."""
    value = _json(text)
    return text if value is None and text.strip() != "null" else value
