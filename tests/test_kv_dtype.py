"""The risk: a page whose form is read otherwise than it was written, or whose price in bytes is not what is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import KV_DTYPES, KV_EXPERIMENTAL, PAGE, EngineConfig, RecallParams, SamplingParams
from engine.engine import Engine
from engine.errors import ConfigError, EngineError
from engine.examine import adopt
from engine.kv.budget import Memory, plan_capacity
from engine.kv.choose import choose_kv
from engine.kv.dtype import GROUP, KV, Form, named
from engine.kv.page import KVShape
from engine.units import GIB
from gates.plain import plain_logits, tolerance

STEP = {"int8": 1 / 127, "int4": 1 / 7, "fp8": 32 / 448}  # of the largest in a group: a rounding errs by half of it
CODED = [name for name in KV if not KV[name].plain]


def form(name: str, heads: int = 2, dim: int = 48) -> Form:
    return Form(KV[name], heads, dim)


def test_the_names_that_a_person_may_give_are_those_that_there_are():
    assert set(KV_DTYPES) == {"auto", *KV} and set(KV_EXPERIMENTAL) < set(KV)


@pytest.mark.parametrize("name", KV)
@pytest.mark.parametrize("dim", [16, 48, 64, 80, 128])
def test_what_is_written_is_what_comes_back_to_half_a_step_of_its_own_scale(name, dim):
    torch.manual_seed(dim)
    shape = form(name, dim=dim)
    pages = torch.zeros(3, *shape.shape, dtype=KV[name].element)
    sizes = torch.rand(100, 2, 1) * 10 + 0.01  # every token and head has its own
    keys, values = (torch.randn(100, 2, dim) * sizes for _ in range(2))
    place, row = torch.arange(100) // PAGE + 1, torch.arange(100) % PAGE
    shape.write(pages, place, row, keys, values)
    decoded = shape.decode(pages, torch.float32)
    assert decoded.shape == (3, 2, 2, PAGE, dim)
    for part, numbers, code in ((0, keys, KV[name].key), (1, values, KV[name].value)):
        got = decoded[:, part].permute(0, 2, 1, 3).reshape(3 * PAGE, 2, dim)
        assert not got[:PAGE].any() and not got[PAGE + 100 :].any(), "written beside its place"
        group = code.group or dim
        for start in range(0, dim, group):
            wanted = numbers[..., start : start + group]
            error = (got[PAGE : PAGE + 100, :, start : start + group] - wanted).abs().amax(-1)
            step = STEP.get(code.kind) or torch.finfo(code.element).eps
            assert (error <= 0.51 * step * 1.005 * wanted.abs().amax(-1)).all()


@pytest.mark.parametrize("name", CODED)
def test_one_token_is_written_as_many_are(name):
    shape = form(name)
    keys, values = torch.randn(1, 2, 48), torch.randn(1, 2, 48)
    one, many = (torch.zeros(2, *shape.shape, dtype=torch.uint8) for _ in range(2))
    shape.write(one, 1, 17, keys, values)
    shape.write(many, torch.tensor([1]), torch.tensor([17]), keys, values)
    assert torch.equal(one, many) and one.any()


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_never_comes_back_as_one(name, bad):
    shape = form(name)
    pages = torch.zeros(1, *shape.shape, dtype=torch.uint8)
    keys, values = torch.ones(1, 2, 48), torch.ones(1, 2, 48)
    keys[0, 1, 5] = values[0, 0, 40] = bad
    shape.write(pages, 0, 3, keys, values)
    decoded = shape.decode(pages, torch.float32)[0, :, :, 3]
    assert not decoded[0, 1].isfinite().any() and decoded[0, 0].isfinite().all()
    assert not decoded[1, 0, GROUP:].isfinite().any() and decoded[1, 0, :GROUP].isfinite().all()


@given(st.sampled_from(CODED), st.integers(1, 4), st.integers(1, 40).map(lambda half: 2 * half))
@settings(max_examples=40)
def test_parts_lie_behind_each_other_without_gap_or_overlap(name, heads, dim):
    shape = form(name, heads, dim)
    covered = torch.zeros(2, shape.bytes, dtype=torch.uint8)
    for view in shape.views(covered):
        view.view(torch.uint8).add_(1)
    assert (covered == 1).all()
    assert all(part.at % 16 == 0 for part in shape.parts)


def test_bytes_are_those_of_the_issue():
    sizes = {name: KVShape(36, 8, 128, torch.bfloat16, KV[name]).token_bytes for name in KV}
    assert sizes["bf16"] == sizes["fp16"] == sizes["fp32"] // 2 == 144 * 1024
    assert sizes["k8v4"] == 36 * 8 * (128 + 2 + 64 + 8) <= 0.42 * sizes["bf16"]
    assert sizes["int8"] == sizes["fp8"] == 36 * 8 * (128 + 2 + 128 + 8)
    assert sizes["int4"] == 36 * 8 * (64 + 2 + 64 + 8)


def test_half_precision_pages_of_a_model_with_larger_numbers_stay_finite():
    shape = form("fp16")
    pages = torch.zeros(1, *shape.shape, dtype=torch.float16)
    shape.write(pages, 0, 0, torch.full((1, 2, 48), 1e6), torch.full((1, 2, 48), -1e6))
    assert shape.decode(pages, torch.float32).abs().max() == torch.finfo(torch.float16).max


def test_float32_pages_of_a_16_bit_model_are_refused():
    with pytest.raises(ConfigError, match="twice the bytes"):
        named("fp32", torch.bfloat16)


EXACT = RecallParams(prefill="exact", decode="exact")
QWEN = KVShape(layers=36, kv_heads=8, head_dim=128, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("ram", "context", "asked", "kv"),
    [
        (30, 131072, "auto", "bf16"),  # 18 GiB
        (12, 131072, "auto", "k8v4"),
        (12, 131072, "int4", "int4"),
        (12, None, "auto", "k8v4"),  # the trained context
        (30, None, "auto", "bf16"),
    ],
)
def test_auto_takes_the_models_own_dtype_where_it_fits(ram, context, asked, kv):
    config = EngineConfig(model="", max_context=context, kv_dtype=asked)

    def plan(shape):
        memory = Memory(ram * GIB, 40 * GIB)
        return plan_capacity(config, shape, 131072, memory, weight_bytes=0, digest_token_bytes=0, staging_pages=64)

    shape, capacity = choose_kv(config, QWEN, 131072, plan)
    assert shape.form.dtype.name == capacity.kv == kv and capacity.context == 131072
    assert capacity.kv_reason.startswith("auto: " if asked == "auto" else "--kv-dtype")
    assert ("18 GiB" in capacity.kv_reason) == (kv == "k8v4")


def test_a_context_that_no_dtype_holds_is_refused_with_the_largest_of_the_small_one():
    config = EngineConfig(model="", max_context=131072)
    with pytest.raises(ConfigError, match=r"7\.1 GiB") as refused:
        choose_kv(
            config,
            QWEN,
            131072,
            lambda shape: plan_capacity(
                config,
                shape,
                131072,
                Memory(4 * GIB, 40 * GIB),
                weight_bytes=0,
                digest_token_bytes=0,
                staging_pages=64,
            ),
        )
    assert "--max-context" in refused.value.fix


def test_an_engine_that_ram_holds_only_in_codes_starts_in_them_and_says_so(phantom):
    said = []
    config = EngineConfig(model="", max_context=32768, kv_capacity=2048, ram_limit_bytes=GIB + (100 << 20))
    engine = Engine(config, phantom, say=said.append)
    assert engine.stats()["kv_dtype"] == engine.capacity.kv == "k8v4" and engine.stats()["host_bytes"] < 100 << 20
    assert any(line.startswith("kv k8v4 (auto: 32,768 tokens in fp32 are 128 MiB") for line in said), said
    engine.close()
    with pytest.raises(ConfigError, match="128 MiB"):
        Engine(replace(config, kv_dtype="fp32"), phantom)


@pytest.mark.parametrize("name", KV)
def test_a_ring_reads_bit_for_bit_what_a_dense_cache_of_the_dtype_reads(phantom, words, name):
    tokens = phantom.tokenizer.encode(words(900))
    logits = []
    for pool in (2048, 640):
        engine = Engine(
            EngineConfig(model="", max_context=2048, kv_capacity=pool, prefill_chunk=128, kv_dtype=name, sink=64),
            phantom,
        )
        logits.append(engine.logits(tokens, RecallParams(prefill="exact")))
        assert engine.audit(deep=True) and engine.stats()["kv_dtype"] == name
        assert (engine.stats()["layer_pages_streamed"] > 0) == (pool == 640)
        engine.close()
    assert torch.equal(*logits)


@pytest.mark.parametrize("name", ["int8", "k8v4", "int4"])
def test_a_dense_pass_is_the_plain_formula_with_rounded_keys_and_values_and_no_other(phantom, words, name):
    tokens = phantom.tokenizer.encode(words(300))
    engine = Engine(EngineConfig(model="", max_context=512, prefill_chunk=128, kv_dtype=name), phantom)
    logits, model = engine.logits(tokens), phantom.transformer
    engine.close()

    def off(kv):
        return float((logits - plain_logits(model, tokens, kv=kv)).abs().max())

    assert off(name) <= tolerance(torch.float32, name)
    assert off("auto") > 5 * off(name)


def test_pages_of_another_dtype_are_not_adopted_as_if_they_were_ones_own(phantom):
    int8, fp8 = (Engine(EngineConfig(model="", max_context=512, kv_dtype=name), phantom) for name in ("int8", "fp8"))
    assert int8.stats()["host_bytes"] == fp8.stats()["host_bytes"]
    with pytest.raises(EngineError, match="pages of int8 can't be adopted as fp8"):
        adopt(fp8, int8, fp8.prepare("Hello"))
    for engine in (int8, fp8):
        engine.close()


@pytest.mark.parametrize("name", ["k8v4", "fp8"])
def test_a_turn_resumes_from_coded_pages_and_answers_as_a_cold_run(phantom, words, name):
    text = words(1500)

    def make():
        config = EngineConfig(model="", max_context=4096, kv_capacity=1024, prefill_chunk=256, kv_dtype=name)
        return Engine(config, phantom)

    def ask(engine, more):
        return engine.complete(engine.prepare(text + more, SamplingParams(max_tokens=8, ignore_eos=True), EXACT))

    warm, cold = make(), make()
    ask(warm, " first")
    second = ask(warm, " first and then")
    assert second.usage.cached > 1000 and second.recall.layer_pages_streamed > 0
    assert second.tokens == ask(cold, " first and then").tokens
    for engine in (warm, cold):
        engine.audit(deep=True)
        engine.close()
