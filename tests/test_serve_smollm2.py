"""The risk: what works with the phantom's plain template fails with a real model's. Skips where SmolLM2 isn't here."""

from __future__ import annotations

import openai
import pytest
import torch

from engine.model.load import load_model
from tests.models import smollm2_file
from tests.serving import scripted, served

pytestmark = pytest.mark.slow
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


@pytest.fixture(scope="module")
def live():
    model = load_model(smollm2_file(), torch.device("cpu"), torch.float32)
    with served(model, max_context=2048, kv_capacity=2048) as live:
        yield live


@pytest.fixture(scope="module")
def client(live):
    return openai.OpenAI(base_url=f"{live.base}/v1", api_key="none", max_retries=0)


def ask(text):
    return [{"role": "user", "content": text}]


def test_it_answers_a_question_whole_and_streamed_alike_and_stops_by_itself(live, client):
    fields = {"model": live.service.model_id, "messages": ask("What is the capital of France?"), "max_tokens": 40}
    whole = client.chat.completions.create(**fields)
    assert "Paris" in whole.choices[0].message.content and whole.choices[0].finish_reason == "stop"
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == whole.choices[0].message.content and "<|im_end|>" not in said
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_tools_reach_its_prompt_and_a_call_and_its_result_go_round(live, client):
    """135 million parameters call nothing by themselves: what it says is scripted, all else is real."""
    fields = {"model": live.service.model_id, "tools": TOOLS, "max_tokens": 60}
    plain = client.chat.completions.create(model=fields["model"], messages=ask("Weather?"), max_tokens=1)
    with scripted(live, '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'):
        answer = client.chat.completions.create(messages=ask("Weather?"), **fields)
    assert answer.usage.prompt_tokens > plain.usage.prompt_tokens + 50
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls" and call.function.arguments == '{"city": "Zürich"}'
    messages = [
        *ask("Weather?"),
        answer.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "It rains in Zürich."},
    ]
    after = client.chat.completions.create(messages=messages, **{**fields, "max_tokens": 8})
    assert after.usage.prompt_tokens_details.cached_tokens >= answer.usage.prompt_tokens // 64 * 64 - 64
