"""The risk: a client that works with OpenAI or Anthropic doesn't work here."""

from __future__ import annotations

import json

import anthropic
import openai
import pytest

from tests.serving import Live, scripted, served

TOOLS = [
    {
        "type": "function",
        "function": {"name": "look_up", "description": "d", "parameters": {"type": "object", "properties": {}}},
    }
]
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"key": "Größe"}}\n</tool_call>'


@pytest.fixture(scope="module")
def live(phantom):
    with served(phantom) as live:
        yield live


@pytest.fixture(scope="module")
def client(live: Live):
    return openai.OpenAI(base_url=f"{live.base}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def claude(live: Live):
    return anthropic.Anthropic(base_url=live.base, api_key="none", max_retries=0)


def ask(text="Hello there"):
    return [{"role": "user", "content": text}]


def test_a_chat_answers_with_usage_timings_and_what_recall_did(client):
    answer = client.chat.completions.create(model="phantom", messages=ask(), max_tokens=5)
    assert answer.choices[0].finish_reason in ("stop", "length") and answer.choices[0].message.role == "assistant"
    extra = answer.model_extra
    assert extra["timings"]["cache_n"] + extra["timings"]["prompt_n"] == answer.usage.prompt_tokens
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert extra["kvring"]["over_pool"] is False and extra["kvring"]["max_tokens"] == 5


def test_a_stream_says_what_the_whole_answer_says_and_ends_with_usage(client):
    fields = {"model": "phantom", "messages": ask(), "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    finishes = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert finishes[-1] == "length" and not any(finishes[:-1])
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == 8
    assert len({chunk.id for chunk in chunks}) == 1


def test_plain_completions_answer_and_stream(client):
    fields = {"model": "phantom", "prompt": "The river", "max_tokens": 6, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**fields, logprobs=2)
    streamed = list(client.completions.create(**fields, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text
    assert streamed[-1].choices[0].finish_reason == "length"
    logprobs = whole.choices[0].logprobs
    assert len(logprobs.tokens) == 6 and all(len(top) == 2 for top in logprobs.top_logprobs)


def test_a_stop_string_ends_the_answer_and_is_not_shown(live, client):
    with scripted(live, "one two STOP three"):
        answer = client.chat.completions.create(model="phantom", messages=ask(), stop=["STOP", "x"])
    assert answer.choices[0].message.content == "one two " and answer.choices[0].finish_reason == "stop"


def test_logprobs_name_the_chosen_token_and_its_rivals(client):
    answer = client.chat.completions.create(
        model="phantom", messages=ask(), max_tokens=3, logprobs=True, top_logprobs=2, extra_body={"ignore_eos": True}
    )
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 3 and all(len(entry.top_logprobs) == 2 for entry in entries)
    assert "".join(entry.token for entry in entries) == answer.choices[0].message.content
    assert all(entry.logprob == entry.top_logprobs[0].logprob <= 0 for entry in entries)  # greedy


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_comes_back_as_one_and_its_result_goes_in(live, client, stream):
    fields = {"model": "phantom", "messages": ask("What is it?"), "tools": TOOLS, "stream": stream}
    with scripted(live, f"Let me look.{CALL}"):
        answer = client.chat.completions.create(**fields)
        if stream:
            chunks = list(answer)
            calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            finish = chunks[-1].choices[0].finish_reason
        else:
            calls, text = answer.choices[0].message.tool_calls, answer.choices[0].message.content
            finish = answer.choices[0].finish_reason
    assert finish == "tool_calls" and text == "Let me look." and len(calls) == 1
    assert calls[0].function.name == "look_up" and json.loads(calls[0].function.arguments) == {"key": "Größe"}
    turn = {"role": "assistant", "tool_calls": [call.model_dump(exclude={"index"}) for call in calls]}
    result = {"role": "tool", "tool_call_id": calls[0].id, "content": "42"}
    after = client.chat.completions.create(
        model="phantom", messages=[*ask("What is it?"), turn, result], tools=TOOLS, max_tokens=2
    )
    assert after.usage.prompt_tokens > 20


def test_parallel_calls_are_left_out_where_they_are_not_wanted_and_it_is_said(live, client):
    with scripted(live, CALL + CALL, CALL + CALL):
        both, one = (
            client.chat.completions.create(
                model="phantom", messages=ask(), tools=TOOLS, max_tokens=150, parallel_tool_calls=parallel
            )
            for parallel in (True, False)
        )
    assert len(both.choices[0].message.tool_calls) == 2 and len(one.choices[0].message.tool_calls) == 1
    assert any("left out" in warning for warning in one.model_extra["kvring"]["warnings"])


@pytest.mark.parametrize(
    "text", ['<tool_call>{"name": "look_up", "arg</tool_call>', '<tool_call>{"name": "other"}</tool_call>', '{"a": 1}']
)
def test_a_malformed_call_stays_text(live, client, text):
    with scripted(live, text):
        answer = client.chat.completions.create(model="phantom", messages=ask(), tools=TOOLS)
    assert answer.choices[0].message.content == text and not answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "stop"


def test_thinking_is_told_apart_and_an_answer_of_thinking_only_says_so(live, client):
    with scripted(live, "<think>\nhm, </think>\n\nYes.", "<think>hm"):
        answer = client.chat.completions.create(model="phantom", messages=ask())
        assert answer.choices[0].message.content == "Yes."
        assert answer.choices[0].message.reasoning_content == "hm, "
        empty = client.chat.completions.create(model="phantom", messages=ask())
    assert empty.choices[0].message.content == ""
    assert any("thinking only" in warning for warning in empty.model_extra["kvring"]["warnings"])


def test_thinking_never_eats_the_last_quarter_of_the_answer(live, client):
    with scripted(live, "<think>" + "and then " * 200):
        answer = client.chat.completions.create(model="phantom", messages=ask(), max_tokens=100)
    assert answer.usage.completion_tokens == 100
    message = answer.choices[0].message
    assert message.content and len(message.reasoning_content) > 100
    tokenizer = live.engine.model.tokenizer
    assert len(tokenizer.encode(message.content)) >= 20
    assert any("budget" in warning for warning in answer.model_extra["kvring"]["warnings"])


def test_each_refusal_is_the_exception_class_that_clients_catch(client):
    def create(**fields):
        return client.chat.completions.create(**{"model": "phantom", "messages": ask(), "max_tokens": 2, **fields})

    with pytest.raises(openai.NotFoundError, match="'phantom'") as caught:
        create(model="gpt-4o")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="logit_bias") as caught:
        create(logit_bias={"1": 5})
    assert caught.value.code == "unsupported_field" and caught.value.param == "logit_bias"
    with pytest.raises(openai.BadRequestError) as caught:
        create(temperature=-1)
    assert caught.value.code == "invalid_value" and caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match=r"18,\d\d\d tokens.*8,192") as caught:
        create(messages=ask("word " * 9000))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="stop"):
        create(stop=list("abcde"))
    create(n=1, logit_bias={}, response_format={"type": "text"}, extra_body={"never_heard_of": 1})


def test_models_are_listed_under_the_name_that_requests_must_use(client):
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id == "phantom"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("a/b")


def test_anthropic_messages_answer_and_count(claude):
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    fields = {"model": "phantom", "messages": ask(), "system": system}
    answer = claude.messages.create(**fields, max_tokens=4, extra_headers={"anthropic-beta": "never-heard-of-2030"})
    usage = answer.usage
    assert answer.content[0].type == "text" and answer.stop_reason in ("end_turn", "max_tokens")
    counted = claude.messages.count_tokens(**fields).input_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens == counted


def test_anthropic_streams_thinking_text_and_tool_use_as_blocks(live, claude):
    tools = [{"name": "look_up", "description": "d", "input_schema": {"type": "object"}}]
    fields = {"model": "phantom", "messages": ask(), "max_tokens": 300, "tools": tools}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    with (
        scripted(live, f"<think>hm</think>Looking.{CALL}"),
        claude.messages.stream(**fields, extra_body={"thinking": thinking}) as stream,
    ):
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.content[2].input == {"key": "Größe"} and message.stop_reason == "tool_use"
    turn = {"role": "assistant", "content": [block.model_dump() for block in message.content]}
    result = {"type": "tool_result", "tool_use_id": message.content[2].id, "content": [{"type": "text", "text": "42"}]}
    after = claude.messages.create(
        **{**fields, "max_tokens": 2, "messages": [*ask(), turn, {"role": "user", "content": [result]}]}
    )
    assert after.usage.output_tokens <= 2


def test_anthropic_stop_sequences_and_errors_have_their_form(live, claude):
    with scripted(live, "one END two"):
        answer = claude.messages.create(model="phantom", messages=ask(), max_tokens=50, stop_sequences=["END"])
    assert (answer.stop_reason, answer.stop_sequence, answer.content[0].text) == ("stop_sequence", "END", "one ")
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.messages.create(model="claude", messages=ask(), max_tokens=2)
    assert caught.value.body["error"]["type"] == "not_found_error"
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    with pytest.raises(anthropic.BadRequestError, match="no eyes"):
        claude.messages.create(model="phantom", messages=[{"role": "user", "content": [image]}], max_tokens=2)


def test_a_billing_header_that_changes_with_each_request_costs_no_reuse(claude, words):
    system = words(300)
    read = []
    for n in (1, 2):
        blocks = [{"type": "text", "text": f"x-anthropic-billing-header: cch={n}"}, {"type": "text", "text": system}]
        answer = claude.messages.create(model="phantom", messages=ask(), max_tokens=1, system=blocks)
        read.append(answer.usage.cache_read_input_tokens)
    assert read[1] >= 256
