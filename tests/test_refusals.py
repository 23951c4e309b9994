"""The risk: a setting or a request that can't be served starts, and then answers wrongly or dies."""

from __future__ import annotations

import pytest
import torch

from engine.config import EngineConfig, RecallParams, SamplingParams
from engine.engine import Engine
from engine.errors import ConfigError, EngineError, ModelError, OutOfMemoryError, RequestError
from engine.units import GIB, MIB, format_bytes, parse_bytes, parse_tokens


def test_the_pool_does_not_grow_with_the_context(make_engine):
    small, large = (make_engine(max_context=size, kv_capacity=4032) for size in (8_192, 200_000))
    assert small.stats()["pool_bytes"] == large.stats()["pool_bytes"]


@pytest.mark.parametrize(
    ("prompt", "sampling", "recall", "says"),
    [
        ("", {}, {}, "empty"),
        ([], {}, {}, "empty"),
        ([{"role": "user", "content": "  "}], {}, {}, "empty"),
        ("word " * 9000, {}, {}, "leaves no room"),
        ("The", {"temperature": float("nan")}, {}, "temperature"),
        ("The", {"temperature": -1}, {}, "temperature"),
        ("The", {"top_p": 0}, {}, "top_p"),
        ("The", {"max_tokens": 0}, {}, "max_tokens"),
        ("The", {"logprobs": 99}, {}, "logprobs"),
        ("The", {}, {"scorer": "magic"}, "scorer 'magic'"),
        ("The", {}, {"prefill": "fast"}, "prefill 'fast'"),
        ("The", {}, {"control": "best"}, "control 'best'"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_before_any_work(make_engine, prompt, sampling, recall, says):
    engine = make_engine()
    with pytest.raises(RequestError) as caught:
        engine.prepare(prompt, SamplingParams(**sampling), RecallParams(**recall))
    assert says in caught.value.message and caught.value.fix
    assert engine.complete(engine.prepare("The", SamplingParams(max_tokens=1))).usage.generated == 1


def test_exact_attention_under_compact_positions_is_refused(make_engine):
    engine = make_engine(positions="compact")
    with pytest.raises(RequestError, match="absolute positions"):
        engine.prepare("The", None, RecallParams(prefill="exact"))


def test_an_output_cut_by_the_context_says_so(make_engine, words):
    engine = make_engine(max_context=256, kv_capacity=256)
    result = engine.complete(engine.prepare(words(200), SamplingParams(max_tokens=500, ignore_eos=True)))
    assert result.finish == "length" and "lowered from 500 to" in result.warnings[0]
    assert result.usage.prompt + result.usage.generated == 256


def test_prompt_and_output_beyond_the_pool_are_not_cut_at_its_edge(make_engine, words):
    engine = make_engine(max_context=4096, kv_capacity=12 * 64, prefill_chunk=64, sink=64)
    result = engine.complete(engine.prepare(words(700), SamplingParams(max_tokens=400, ignore_eos=True)))
    assert result.usage.generated == 400 and result.recall.over_pool


def test_recall_off_over_the_pool_warns_and_within_the_pool_does_not(make_engine, words):
    engine = make_engine(retrieve="off")
    over = engine.complete(engine.prepare(words(2400), SamplingParams(max_tokens=2)))
    assert any("recall was off" in warning for warning in over.warnings) and over.recall.decode_mode == "window"
    within = engine.complete(engine.prepare(words(1000), SamplingParams(max_tokens=2)))
    assert within.warnings == () and within.recall.hidden_pages == 0


def test_lexical_recall_that_matches_nothing_says_so(make_engine, words, phantom):
    engine = make_engine()
    unseen = "".join(phantom.tokenizer.decode([id]) for id in range(900, 960))
    prompt = [{"role": "system", "content": words(2600)}, {"role": "user", "content": unseen}]
    params = RecallParams(scorer="lexical", prefill="window")
    result = engine.complete(engine.prepare(prompt, SamplingParams(max_tokens=2), params))
    if result.recall.lexical_matches == 0:
        assert any("lexical recall found no page" in warning for warning in result.warnings)


def test_a_closed_engine_gives_its_memory_back_though_somebody_holds_it(phantom):
    import psutil

    engine, process = Engine(EngineConfig(model="", max_context=100_000), phantom), psutil.Process()
    size, held = engine.capacity.host_bytes, process.memory_info().rss
    engine.close()
    assert held - process.memory_info().rss > 0.9 * size > 300 * MIB
    with pytest.raises(EngineError, match="closed"):
        engine.admit(engine.prepare("Hello"))


def test_a_system_prompt_grows_the_sink(make_engine, words):
    engine = make_engine(kv_capacity=40 * 64)
    prompt = [{"role": "system", "content": words(500)}, {"role": "user", "content": words(2600) + " What?"}]
    assert engine.prepare(prompt).budget.sink == 8
    assert engine.prepare(prompt[1:]).budget.sink == 4


def test_devices_and_dtypes_that_do_not_exist_are_refused(tmp_path):
    for settings in ({"device": "tpu"}, {"device": "cuda" if not torch.cuda.is_available() else "cuda:99x"}):
        with pytest.raises(ConfigError):
            Engine.load(EngineConfig(model=str(tmp_path), **settings))
    with pytest.raises(ConfigError):
        Engine.load(EngineConfig(model=str(tmp_path), dtype="int3"))
    with pytest.raises(ModelError):
        Engine.load(EngineConfig(model=str(tmp_path / "nothing")))


def test_amounts_are_read_as_people_write_them():
    assert parse_bytes("12GiB") == parse_bytes("12G") == 12 * GIB and parse_bytes("12GB") == 12 * 10**9
    assert parse_tokens("256K") == 262_144 and parse_tokens("4,032") == 4032
    assert format_bytes(1536) == "1.5 KiB"
    for text in ("", "many", "12 parsecs", "-3"):
        with pytest.raises(ConfigError):
            parse_bytes(text)
        with pytest.raises(ConfigError):
            parse_tokens(text)


def test_a_stop_that_is_one_string_is_refused_rather_than_read_letter_by_letter(make_engine):
    with pytest.raises(RequestError, match="one string"):
        make_engine().prepare("The", SamplingParams(stop="END"))


def test_code_points_that_are_no_characters_are_refused(make_engine):
    with pytest.raises(RequestError, match="no character"):
        make_engine().prepare("a\ud800b")


def test_the_smallest_temperature_still_draws(make_engine):
    engine = make_engine()
    result = engine.complete(engine.prepare("The", SamplingParams(max_tokens=2, temperature=1e-40, ignore_eos=True)))
    assert result.usage.generated == 2


@pytest.mark.parametrize(
    "error", [torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 96.00 MiB.\nMore."), MemoryError()]
)
def test_a_model_that_outgrows_memory_while_it_is_loaded_is_refused_with_a_fix(monkeypatch, error):
    def fails(*_):
        raise error

    monkeypatch.setattr("engine.engine.load_model", fails)
    with pytest.raises(OutOfMemoryError, match=r"while big.gguf was loaded: (CUDA out of memory|no detail)") as refused:
        Engine.load(EngineConfig(model="big.gguf", device="cpu"))
    assert "kvring plan big.gguf" in refused.value.fix and "\n" not in refused.value.message
    monkeypatch.setattr("engine.engine.load_model", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Engine.load(EngineConfig(model="big.gguf", device="cpu"))
