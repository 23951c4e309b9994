"""The risk: the ring changes an answer that the dense engine would have given."""

from __future__ import annotations

import pytest
import torch
import transformers

from engine.config import RecallParams, SamplingParams
from tests.models import phantom_folder

TOKENS = 2700


@pytest.fixture(scope="module")
def tokens(phantom, words):
    return phantom.tokenizer.encode(words(3000))[:TOKENS]


@pytest.fixture(scope="module")
def oracle(tokens):
    model = transformers.AutoModelForCausalLM.from_pretrained(phantom_folder(), dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


def test_dense_logits_are_those_of_transformers(make_engine, tokens, oracle):
    got = make_engine(ring="off", kv_capacity=None).logits(tokens)
    # transformers rounds rotary angles to float32 at far positions; ours are float64, so the bound grows with length.
    assert (got[:512] - oracle[:512]).abs().max() < 1e-4
    assert (got - oracle).abs().max() < 1e-3


def test_a_streaming_exact_pass_gives_the_dense_logits_bit_for_bit(make_engine, tokens):
    dense = make_engine(ring="off", kv_capacity=None).logits(tokens)
    ring = make_engine()
    assert torch.equal(ring.logits(tokens, RecallParams(prefill="exact")), dense)
    assert ring.stats()["layer_pages_streamed"] > 0


@pytest.mark.parametrize("mode", ["exact", "recall", "window"])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 31 * 64 + 7, 32 * 64])
def test_up_to_the_pool_every_mode_is_the_dense_computation(make_engine, tokens, mode, length):
    dense = make_engine(ring="off", kv_capacity=None).logits(tokens[:length])
    assert torch.equal(make_engine().logits(tokens[:length], RecallParams(prefill=mode)), dense)


@pytest.mark.parametrize("retrieve", ["off", "auto"])
@pytest.mark.parametrize("ring", ["off", "auto", "on"])
@pytest.mark.parametrize("memory", ["pageable", "auto"])
def test_the_three_switches_leave_a_fitting_prompt_dense(make_engine, tokens, retrieve, ring, memory):
    dense = make_engine(ring="off", kv_capacity=None).logits(tokens[:1000])
    engine = make_engine(ring=ring, retrieve=retrieve, host_memory=memory, kv_capacity=None if ring == "off" else 2048)
    assert torch.equal(engine.logits(tokens[:1000]), dense)


def test_one_page_over_the_pool_a_window_is_not_dense(make_engine, tokens):
    """The control of the tests above: they can see a hidden page."""
    dense = make_engine(ring="off", kv_capacity=None).logits(tokens[: 33 * 64])
    assert not torch.equal(make_engine().logits(tokens[: 33 * 64], RecallParams(prefill="window")), dense)


def test_exact_decode_over_the_pool_is_dense_greedy(make_engine, words):
    text, params = words(2400), SamplingParams(max_tokens=12, ignore_eos=True)
    dense, ring = make_engine(ring="off", kv_capacity=None), make_engine()
    expected = dense.complete(dense.prepare(text, params))
    got = ring.complete(ring.prepare(text, params, RecallParams(prefill="exact", decode="exact")))
    assert got.recall.over_pool and got.tokens == expected.tokens


def test_compact_positions_are_absolute_ones_while_all_fits(make_engine, tokens):
    dense = make_engine(ring="off", kv_capacity=None).logits(tokens[:1500])
    assert torch.equal(make_engine(positions="compact").logits(tokens[:1500]), dense)


def test_compact_positions_serve_more_than_the_model_was_trained_on(make_engine, words):
    trained = make_engine().model.config.trained_context
    engine = make_engine(positions="compact", max_context=trained + 4096)
    prepared = engine.prepare(words(2400), SamplingParams(max_tokens=8, ignore_eos=True))
    result = engine.complete(prepared)
    assert result.recall.over_pool and "exact" not in result.recall.prefill_modes
    assert result.usage.generated == 8
