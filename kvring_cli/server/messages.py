"""What clients send as messages, tools and thinking, in the one form that chat templates read (Hugging Face's)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine.text.tools import spell_tools
from kvring_cli.server.errors import APIError, invalid

if TYPE_CHECKING:
    from engine.engine import Engine

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
EFFORTS: dict[str, int | None] = {"minimal": 512, "low": 1024, "medium": 4096, "high": None, "xhigh": None}
"""Tokens of thinking; None is what the answer's length allows."""


def from_openai(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], engine: Engine | None
) -> list[dict[str, Any]]:
    out = []
    for index, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise invalid(f"messages.{index}.role must be one of {', '.join(ROLES)}", f"messages.{index}.role")
        content = message.get("content")
        if content is not None and not isinstance(content, str | list):
            raise invalid(f"messages.{index}.content must be a string or a list of parts", f"messages.{index}.content")
        one = {**message, "role": ROLES[role]}
        if message.get("tool_calls") is not None:
            one["tool_calls"] = [_call(call, f"messages.{index}.tool_calls") for call in _list(message, index)]
            one["content"] = content or ""
        out.append(one)
    return with_tools(out, tools, engine)


def with_tools(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], engine: Engine | None
) -> list[dict[str, Any]]:
    """Tools in the system prompt, calls and their results as text, where the template has no place for them."""
    if engine is None or engine.model.chat is None or "tools" in engine.model.chat.source:
        return messages
    out = [_spelled(message) for message in messages]
    if tools:
        text = spell_tools(tools)
        if out and out[0]["role"] == "system" and isinstance(out[0].get("content"), str):
            out[0] = {**out[0], "content": f"{out[0]['content']}\n\n{text}"}
        else:
            out.insert(0, {"role": "system", "content": text})
    return out


def tools_of(tools: list[dict[str, Any]] | None, choice: Any) -> tuple[list[dict[str, Any]], frozenset[str]]:
    """The tools that the template gets, and their names; none when the choice is `none`."""
    if choice not in (None, "auto", "none"):
        raise APIError(
            400, "unsupported_field", "'tool_choice' is supported as auto or none: no call can be forced", "tool_choice"
        )
    if not tools or choice == "none":
        return [], frozenset()
    names = []
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, dict):
            raise invalid(f"tools.{index} is not a function tool", f"tools.{index}")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise invalid(f"tools.{index}.function has no name", f"tools.{index}.function.name")
        names.append(function["name"])
    return tools, frozenset(names)


def thinking_of(kwargs: Mapping[str, Any] | None, effort: str | None) -> tuple[int | None, dict[str, Any]]:
    """The thinking budget, and what the template is told."""
    template = dict(kwargs or {})
    for name in ("messages", "tools", "add_generation_prompt", "documents"):
        if name in template:
            raise invalid(f"chat_template_kwargs can't hold '{name}'", f"chat_template_kwargs.{name}")
    if effort is None:
        return None, template
    if effort == "none":
        return 0, {"enable_thinking": False, **template}
    if effort not in EFFORTS:
        raise invalid(f"reasoning_effort must be one of none, {', '.join(EFFORTS)}", "reasoning_effort")
    return EFFORTS[effort], {"enable_thinking": True, "reasoning_effort": effort, **template}


def _list(message: Mapping[str, Any], index: int) -> list[Any]:
    calls = message["tool_calls"]
    if not isinstance(calls, list):
        raise invalid(f"messages.{index}.tool_calls must be a list", f"messages.{index}.tool_calls")
    return calls


def _call(call: Any, param: str) -> dict[str, Any]:
    """Templates want arguments as an object; clients send them as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"{param} holds something that is no function call", param)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # what a model wrote once, it may see again
            arguments = json.loads(arguments or "{}")
    return {**call, "function": {**function, "arguments": arguments}}


def _spelled(message: dict[str, Any]) -> dict[str, Any]:
    """Calls and results as Hermes writes them."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{_text(message.get('content'))}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = [
        json.dumps({"name": call["function"]["name"], "arguments": call["function"]["arguments"]}, ensure_ascii=False)
        for call in message["tool_calls"]
    ]
    text = "\n".join([_text(message.get("content")), *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)])
    return {"role": message["role"], "content": text.strip()}


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
