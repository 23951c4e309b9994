"""The risk: thoughts, calls and text get mixed up, depending on where a stream happens to be cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.reasoning import Reasoning, ThinkingBudget, thinking_limit
from engine.text.tools import Call, CallReader, parse_calls
from kvring_cli.server import blocks, messages
from kvring_cli.server.blocks import from_anthropic
from kvring_cli.server.errors import APIError
from kvring_cli.server.messages import from_openai

NAMES = {"add", "look_up"}
ADD = Call("add", {"a": 1})


def merged(parts):
    out = []
    for kind, text in parts:
        if out and out[-1][0] == kind:
            out[-1] = (kind, out[-1][1] + text)
        else:
            out.append((kind, text))
    return out


def reason(pieces, inside=False):
    reader = Reasoning(inside)
    return merged([part for piece in pieces for part in reader.push(piece)] + reader.finish())


@pytest.mark.parametrize(
    "text, inside, parts",
    [
        ("Hello", False, [("content", "Hello")]),
        ("<think>\nhm\n</think>\n\nYes", False, [("reasoning", "hm\n"), ("content", "Yes")]),
        ("hm</think>Yes", True, [("reasoning", "hm"), ("content", "Yes")]),
        ("<think>hm", False, [("reasoning", "hm")]),
        ("<thin", False, [("content", "<thin")]),
        ("The tag <think> is a tag", False, [("content", "The tag <think> is a tag")]),
        ("<think>a</thin b", False, [("reasoning", "a</thin b")]),
        ("<think></think>Yes </think>", False, [("content", "Yes </think>")]),
        ("  Hello", False, [("content", "  Hello")]),
    ],
)
def test_thinking_is_told_apart_wherever_the_stream_is_cut(text, inside, parts):
    assert reason([text], inside) == parts
    assert reason(list(text), inside) == parts
    for cut in range(len(text)):
        assert reason([text[:cut], text[cut:]], inside) == parts


@given(st.text(alphabet="<>/thinkx \n"), st.integers(1, 5), st.booleans())
def test_no_character_of_an_answer_is_lost(text, size, inside):
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    said = "".join(text for _, text in reason(pieces, inside))
    whole = text.replace("<think>", "", 1).replace("</think>", "", 1)
    assert said.replace("\n", "").strip() in (whole.replace("\n", "").strip(), text.replace("\n", "").strip())


def test_a_budget_closes_thinking_once():
    budget = ThinkingBudget(3, [7, 8], inside=True)
    assert [list(budget(n, "x")) for n in range(5)] == [[], [], [7, 8], [], []]
    assert budget.spent
    assert thinking_limit(100, None, 4) == 71 and thinking_limit(100, 5, 4) == 5 and thinking_limit(100, 500, 4) == 71


def test_each_way_to_say_how_long_to_think_reaches_budget_and_template():
    off, on = {"enable_thinking": False}, {"enable_thinking": True}
    assert messages.thinking_of(off, None) == (None, off) and messages.thinking_of(None, "none") == (0, off)
    assert messages.thinking_of(None, "low") == (1024, {**on, "reasoning_effort": "low"})
    assert messages.thinking_of(None, None) == (None, {}) == blocks.thinking_of(None)
    assert blocks.thinking_of({"type": "enabled", "budget_tokens": 2048}) == (2048, on)
    assert blocks.thinking_of({"type": "disabled"}) == (0, off)


CALLS = [
    ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "", [ADD]),
    ('Sure. <tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "Sure. ", [ADD]),
    ('<tool_call>{"name": "add", "arguments": {"a": 1}}', "", [ADD]),  # the model stopped before the tag
    ('<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>\n' * 2, "", [ADD, ADD]),
    ("<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", "", [ADD]),
    ('{"name": "add", "parameters": {"a": 1}}', "", [ADD]),
    ('{"name": "add", "parameters": {"a": 1}}; {"name": "look_up", "parameters": {}}', "", [ADD, Call("look_up", {})]),
    ('[{"name": "add", "arguments": {"a": 1}}]', "", [ADD]),
    ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>', None, []),
    ('<tool_call>{"name": "add", "arguments": [1]}</tool_call> then', None, []),
    ("<tool_call>nonsense</tool_call>", None, []),
    ("<tool_cal", None, []),
    ('{"name": "add", "parameters": {"a": 1}} as asked', None, []),
    ("[" * 50_000, None, []),
    ("[link](x) and {braces}", None, []),
]


@pytest.mark.parametrize("text, left, calls", CALLS, ids=lambda value: repr(value)[:40])
def test_whole_calls_are_taken_out_and_all_else_stays_text(text, left, calls):
    assert parse_calls(text, NAMES) == (text if left is None else left, calls)
    if len(text) < 500:
        reader = CallReader(NAMES)
        parts = [part for letter in text for part in reader.push(letter)] + reader.finish()
        assert [part for part in parts if isinstance(part, Call)] == calls
        assert "".join(part for part in parts if isinstance(part, str)) == (text if left is None else left)


def test_plain_text_is_not_held_back_because_there_are_tools():
    reader = CallReader(NAMES)
    assert reader.push("Hello < there") == ["Hello < there"] and reader.push(" <tool_") == [" "]


def test_anthropic_blocks_become_messages_in_their_order():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "1", "content": "c"}, {"type": "text", "text": "d"}],
        },
    ]
    out = from_anthropic([{"type": "text", "text": "s"}], messages, [], None)
    assert [(m["role"], m["content"]) for m in out] == [
        ("system", "s"),
        ("user", "a"),
        ("assistant", "b"),
        ("tool", "c"),
        ("user", "d"),
    ]
    assert out[2]["reasoning_content"] == "t" and out[2]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    with pytest.raises(APIError):
        from_anthropic(None, [{"role": "user", "content": [{"type": "document"}]}], [], None)


def test_the_arguments_of_earlier_calls_reach_the_template_as_objects():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": 1})}}
    (message,) = from_openai([{"role": "assistant", "content": None, "tool_calls": [call]}], [], None)
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1} and message["content"] == ""
