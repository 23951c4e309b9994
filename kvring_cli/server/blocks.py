"""Anthropic's messages, tools and thinking in the form that chat templates read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvring_cli.server.errors import APIError, invalid
from kvring_cli.server.messages import with_tools

if TYPE_CHECKING:
    from engine.engine import Engine

BILLING = "x-anthropic-billing-header"
"""A block that Claude Code puts in front, other with each request: it says nothing and would make every turn cold."""


def from_anthropic(
    system: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]], engine: Engine | None
) -> list[dict[str, Any]]:
    """System blocks joined, tool results as messages of their own. `cache_control` is accepted: all is cached."""
    out: list[dict[str, Any]] = []
    blocks = _blocks(system, "system") if system else []
    texts = [_text(block, f"system.{index}") for index, block in enumerate(blocks)]
    texts = [text for text in texts if not text.startswith(BILLING)]
    if any(texts):
        out.append({"role": "system", "content": "\n\n".join(texts)})
    for index, message in enumerate(messages):
        where, role = f"messages.{index}", message.get("role")
        if role not in ("user", "assistant", "system"):
            raise invalid(f"{where}.role must be user or assistant", f"{where}.role")
        blocks = _blocks(message.get("content"), f"{where}.content")
        out += _assistant(blocks, where) if role == "assistant" else _user(blocks, where, role)
    return with_tools(out, tools, engine)


def tools_of(tools: list[dict[str, Any]] | None, choice: Mapping[str, Any] | None) -> tuple[list[Any], frozenset[str]]:
    """As OpenAI writes them, and their names."""
    kind = (choice or {}).get("type", "auto")
    if kind not in ("auto", "none"):
        raise APIError(
            400, "unsupported_field", "'tool_choice' is supported as auto or none: no call can be forced", "tool_choice"
        )
    if not tools or kind == "none":
        return [], frozenset()
    out = []
    for index, tool in enumerate(tools):
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise invalid(f"tools.{index} has no name", f"tools.{index}.name")
        if tool.get("type", "custom") != "custom":
            message = f"tools.{index} is of type '{tool['type']}', which this server can't run"
            raise APIError(400, "unsupported_field", message, f"tools.{index}.type")
        function = {"name": tool["name"], "description": tool.get("description") or ""}
        out.append({"type": "function", "function": {**function, "parameters": tool.get("input_schema") or {}}})
    return out, frozenset(tool["function"]["name"] for tool in out)


def thinking_of(thinking: Mapping[str, Any] | None) -> tuple[int | None, dict[str, Any]]:
    """The budget, and what the template is told; without the field the template's own default stands."""
    if thinking is None:
        return None, {}
    kind, budget = thinking.get("type"), thinking.get("budget_tokens")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise invalid("thinking.type must be enabled, adaptive or disabled", "thinking.type")
    if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 1):
        raise invalid("thinking.budget_tokens must be a whole number above 0", "thinking.budget_tokens")
    return (0, {"enable_thinking": False}) if kind == "disabled" else (budget, {"enable_thinking": True})


def _user(blocks: list[Any], where: str, role: str) -> list[dict[str, Any]]:
    out, texts = [], []
    for index, block in enumerate(blocks):
        if block.get("type") == "tool_result":
            inner = _blocks(block.get("content") or "", f"{where}.content.{index}.content")
            text = "\n".join(_text(piece, f"{where}.content.{index}") for piece in inner)
            out.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": text})
        else:
            texts.append(_text(block, f"{where}.content.{index}"))
    return [*out, {"role": role, "content": "\n".join(texts)}] if texts else out


def _assistant(blocks: list[Any], where: str) -> list[dict[str, Any]]:
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "tool_use":
            if not isinstance(block.get("name"), str) or not isinstance(block.get("input", {}), dict):
                raise invalid(f"{where}.content.{index} is no whole tool_use block", f"{where}.content.{index}")
            function = {"name": block["name"], "arguments": block.get("input", {})}
            calls.append({"id": str(block.get("id", "")), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind != "redacted_thinking":
            texts.append(_text(block, f"{where}.content.{index}"))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _blocks(content: Any, param: str) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise invalid(f"{param} must be a string or a list of blocks", param)
    return content


def _text(block: Mapping[str, Any], param: str) -> str:
    if block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise APIError(400, "unsupported_field", f"{param} is not text: this engine has no eyes", param)
    return block["text"]
