"""The risk: what coding agents send (many tools, a long system prompt, dozens of tool turns) is slow or refused."""

from __future__ import annotations

import json

import pytest

from engine.errors import HostFullError
from engine.runner import Runner
from kvring_cli.server import job
from kvring_cli.server.blocks import from_anthropic, tools_of
from tests.serving import scripted, served

TOOLS = [
    {
        "name": f"tool_{n}",
        "description": f"Does the thing number {n} with a path.",
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    }
    for n in range(40)
]
CALL = '<tool_call>{{"name": "tool_{0}", "arguments": {{"path": "a/{0}"}}}}</tool_call>'


@pytest.mark.slow
def test_the_next_of_thirty_tool_turns_computes_its_own_tokens_only_and_tools_are_always_seen(
    phantom, words, monkeypatch
):
    """40 tools behind a system prompt of 20,000 tokens, which is longer than the pool."""
    system = [{"type": "text", "text": words(20_000, 1), "cache_control": {"type": "ephemeral"}}]
    messages = [{"role": "user", "content": "Mend the bug."}]

    def result(id, text):
        return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": text}]}

    for n in range(30):
        use = {"type": "tool_use", "id": f"toolu_{n}", "name": f"tool_{n}", "input": {"path": f"a/{n}"}}
        messages += [{"role": "assistant", "content": [use]}, result(use["id"], words(40, n))]
    body = {"model": "phantom", "max_tokens": 60, "system": system, "tools": TOOLS, "kvring": {"prefill": "window"}}
    shares, seen = [], windows_seen(monkeypatch)
    with (
        served(phantom, max_context=32768, kv_capacity=140 * 64, prefill_chunk=512) as live,
        scripted(live, CALL.format(1), CALL.format(2)),
    ):
        for _ in range(2):
            answer = live.http.post("/v1/messages?beta=true", json={**body, "messages": messages}).json()
            assert answer["stop_reason"] == "tool_use", answer
            (call,) = answer["content"]
            assert call["name"] in ("tool_1", "tool_2") and call["input"]
            usage = answer["usage"]
            shares.append(usage["cache_read_input_tokens"] / (usage["cache_read_input_tokens"] + usage["input_tokens"]))
            messages += [{"role": "assistant", "content": answer["content"]}, result(call["id"], words(40, 99))]
        prompt = from_anthropic(system, messages[:1], tools_of(TOOLS, None)[0], live.engine)
        text = live.engine.model.chat.render(prompt)
        before, spelled = text[: text.index('"tool_0"')], text[text.index('"tool_0"') : text.rindex('"tool_39"')]
        first, length = (len(live.engine.model.tokenizer.encode(part, bos=False)) for part in (before, spelled))
    assert answer["kvring"]["over_pool"] and first > 20_000 and length > 2_000
    assert shares[0] == 0 and shares[1] >= 0.95
    definitions = set(range(first // 64, (first + length) // 64 + 1))
    behind = [(past, window) for past, window in seen if past > max(definitions)]
    assert len(behind) > 100 and all(definitions <= window for _, window in behind)
    assert any(len(window) < past for past, window in behind)


def windows_seen(monkeypatch):
    """Of every step in every layer: how many pages lie before it, and which of them it sees."""
    seen, real = [], Runner._window

    def watching(self, frame, layer, q, turned):
        window = real(self, frame, layer, q, turned)
        seen.append((frame.past, set(window.tolist())))
        return window

    monkeypatch.setattr(Runner, "_window", watching)
    return seen


def test_tools_stay_in_the_window_of_a_prompt_over_the_pool(phantom, words):
    with served(phantom, max_context=16384, kv_capacity=100 * 64) as live:
        tools = [{"type": "function", "function": {"name": f"t{n}", "description": "d"}} for n in range(40)]
        body = {"messages": [{"role": "user", "content": words(6000, 2)}], "max_tokens": 200, "stream": True}
        body |= {"tools": tools, "ignore_eos": True, "kvring": {"prefill": "window"}}
        with live.http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            next(line for line in lines if '"content":' in line)
            live.wait(lambda: live.http.get("/v1/ring").json()["sessions"][0]["state"] == "decode")
            (session,) = live.http.get("/v1/ring").json()["sessions"]
        tokens = len(json.dumps(tools)) // 4
        assert session["over_pool"] and session["strip"].startswith("s" * (tokens // 64))


@pytest.mark.parametrize("blind, said", [("throughout", "at all"), ("in prefill", "for the prompt")])
def test_a_recall_that_selects_nothing_shows_in_answer_log_and_metrics(
    phantom, words, monkeypatch, capsys, blind, said
):
    from engine.recall.recall import Recall
    from engine.recall.select import EMPTY

    real = Recall.select

    def select(self, layer, plain, *place):
        return EMPTY if blind == "throughout" or len(plain) > 1 else real(self, layer, plain, *place)

    monkeypatch.setattr(Recall, "select", select)
    with served(phantom) as live:
        answer = live.chat(words(4000, 2), kvring={"prefill": "recall"}, ignore_eos=True)
        live.wait(lambda: "kvring_over_pool_without_selection_total 1.0" in live.http.get("/metrics").text)
        monkeypatch.undo()
        good = live.chat(words(4000, 3), kvring={"prefill": "recall"}, ignore_eos=True)
        assert "kvring_over_pool_without_selection_total 1.0" in live.http.get("/metrics").text
    assert answer["kvring"]["over_pool"] and good["kvring"]["over_pool"] and not good["kvring"]["warnings"]
    assert (answer["kvring"]["recall"]["pages_selected"] == 0) == (blind == "throughout")
    assert any("this is a fault" in warning for warning in answer["kvring"]["warnings"])
    assert f"recall selected nothing {said}" in capsys.readouterr().err


def test_requests_that_outgrow_the_host_store_together_end_one_by_one(phantom, monkeypatch):
    monkeypatch.setattr(job, "UNASKED_ROOM", 64)
    with served(phantom, max_context=448, kv_capacity=448) as live:
        body = {"messages": [{"role": "user", "content": "Hello"}], "stream": True, "ignore_eos": True}
        with (
            live.http.stream("POST", "/v1/chat/completions", json=body) as first,
            live.http.stream("POST", "/v1/chat/completions", json=body) as second,
        ):
            ends = [[line for line in stream.iter_lines() if line][-1] for stream in (first, second)]
        assert ends.count("data: [DONE]") == 1
        lost = next(json.loads(end[6:]) for end in ends if end != "data: [DONE]")["error"]
        assert lost["code"] == "kv_exhausted" and "of 7" in lost["message"]


def test_the_host_stores_refusal_is_told_apart_from_bad_input():
    from kvring_cli.server.errors import as_api_error

    assert as_api_error(HostFullError("full")).status == 429
