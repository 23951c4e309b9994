"""The risk: a layer that slides sees another token than its window."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import PAGE, EngineConfig, RecallParams, SamplingParams
from engine.engine import Engine
from engine.errors import ConfigError
from engine.kv.tail import SNAPSHOTS, TAILS
from engine.model.load import LoadedModel, load_model
from engine.model.random import SHAPES, random_model
from engine.model.sizes import Sizes
from engine.ops.sliding import attend_window
from gates.bare import stops, to_go_on_from, with_template
from gates.haystack import Counter, build
from kvring_cli.planning import Place, make_plan
from kvring_cli.shapes import shape_of
from tests.gguf_models import from_gguf
from tests.models import (
    TOLERANCE,
    VOCAB,
    dense_logits,
    furthest,
    gemma_file,
    random_tokens,
    reference_logits,
    save_folder,
    tiny_model,
)
from tests.sliding import SIX, TOKENS, WINDOW, admitted, answered, oracle

LOCAL_AND_GLOBAL = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
}
MODELS = {
    "six layers, one global": SIX,
    "seven layers, heads of their own": {
        **SIX,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
    },
    "every second, scaled": {
        **SIX,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": LOCAL_AND_GLOBAL,
        "sliding_window": 16,
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    model = tiny_model("gemma3", **MODELS[name])
    loaded = load_model(save_folder(model, tmp_path))
    tokens = random_tokens(350)
    assert furthest(dense_logits(loaded.transformer, tokens), reference_logits(model, tokens)) < TOLERANCE


@settings(max_examples=80)
@given(st.integers(1, 300), st.integers(0, 400), st.integers(1, 130), st.sampled_from([(4, 2), (3, 1)]))
def test_a_token_sees_itself_and_so_many_before_it(rows, before, window, heads):
    random = torch.Generator().manual_seed(rows * before + window)
    q, keys, values = (
        torch.randn(*size, generator=random)
        for size in ((rows, heads[0], 16), (heads[1], before + rows, 16), (heads[1], before + rows, 16))
    )
    got = attend_window(q, keys, values, window, 0.3)
    distance = torch.arange(before, before + rows)[:, None] - torch.arange(before + rows)[None, :]
    group = heads[0] // heads[1]
    scores = torch.einsum("thd,hsd->hts", q, keys.repeat_interleave(group, 0)) * 0.3
    scores.masked_fill_((distance < 0) | (distance >= window), float("-inf"))
    wanted = torch.einsum("hts,hsd->thd", scores.softmax(-1), values.repeat_interleave(group, 0))
    assert (got - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("chunk", [64, 192, 1024])
def test_the_engine_gives_the_logits_of_transformers_over_many_windows(make_gemma, chunk):
    got = make_gemma(ring="off", kv_capacity=None, prefill_chunk=chunk).logits(TOKENS)
    assert furthest(got, reference_logits(oracle(), TOKENS)) < TOLERANCE


def test_a_streaming_exact_pass_gives_the_dense_logits_bit_for_bit(make_gemma):
    dense, ring = make_gemma(ring="off", kv_capacity=None), make_gemma()
    assert torch.equal(ring.logits(TOKENS, RecallParams(prefill="exact")), dense.logits(TOKENS))
    assert ring.stats()["layer_pages_streamed"] > 0


def test_decoding_says_what_transformers_says(make_gemma):
    engine = make_gemma(ring="off", kv_capacity=None)
    prepared = engine.prepare("x", SamplingParams(max_tokens=40, ignore_eos=True))
    prepared.tokens = list(TOKENS[:300])
    got = engine.complete(prepared).tokens
    logits = reference_logits(oracle(), [*TOKENS[:300], *got])
    assert logits[299:-1].argmax(-1).tolist() == list(got)


def test_only_layers_that_see_everything_page(make_gemma):
    engine = make_gemma(max_context=4096)
    assert engine._runner.pool.shape.layers == engine._host.shape.layers == 1
    assert engine.model.config.kv_bytes_per_token == 2 * 16 * 2
    session = admitted(engine, random_tokens(3000, 290))
    while session.phases:
        engine.step()
    held, shape = session.sequence.tail.data.shape[3], engine._runner.tails.shape
    assert held <= shape.room(engine.config.prefill_chunk) < 3000
    engine.cancel(session)
    assert len(engine._runner.tails.snapshots()) <= engine._runner.tails.most
    assert engine._runner.tails.bytes <= engine.capacity.snapshot_bytes


def test_a_model_that_sees_pictures_is_loaded_without_them_and_says_so(tmp_path):
    text = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
    eye = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config={**text, "num_key_value_heads": 2, "initializer_range": 0.2, **SIX},
        vision_config={**eye, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )
    model = transformers.Gemma3ForConditionalGeneration(config).float().eval()
    loaded = load_model(save_folder(model, tmp_path))
    tokens = random_tokens(250)
    assert furthest(dense_logits(loaded.transformer, tokens), reference_logits(model, tokens)) < TOLERANCE
    engine = Engine(EngineConfig(model="", max_context=512), loaded)
    assert any("serves text only" in note for note in engine.capacity.notes)
    engine.close()


def test_a_plan_counts_pages_of_layers_that_see_everything_and_tails_of_the_others(make_gemma):
    shape = shape_of("gemma-3-12b")
    card = Place("a card", 64 << 30, 24 << 30, torch.bfloat16, "")
    plan = make_plan(shape, card, EngineConfig(model=""), weight_bits=4.5)
    capacity = plan.capacity
    assert plan.kv.token_bytes == 2 * 8 * 8 * 256 * 2
    assert capacity.device_bytes - capacity.weight_bytes - capacity.pool_bytes > capacity.tail_bytes
    assert capacity.tail_bytes > TAILS * 1024 * 40 * 2 * 8 * 256 * 2
    engine = make_gemma()
    tails = engine._runner.tails
    assert engine.capacity.tail_bytes == TAILS * tails.open().data.nbytes
    assert engine.capacity.snapshot_bytes == SNAPSHOTS * 2 * PAGE * 5 * 2 * 16 * 4


def test_memory_that_tails_would_take_is_refused_by_name(gemma):
    with pytest.raises(ConfigError, match="layers that slide"):
        Engine(EngineConfig(model="", max_context=512, device_limit_bytes=1 << 20), gemma)


def test_random_weights_of_a_gemma_shape_compute_what_a_file_of_them_would(monkeypatch):
    monkeypatch.setitem(SHAPES, "g", Sizes("gemma3", 6, 64, 96, 4, 1, 16, 320, 1e4, 4096, tied=True, window=WINDOW))
    transformer, _, config = random_model("random:g", torch.device("cpu"), torch.float32)
    assert config.sliding == (0, 1, 2, 3, 4) and config.paged == (5,)
    assert dense_logits(transformer, random_tokens(120)).std() > 0


@pytest.mark.slow
def test_the_real_270m_gives_the_logits_that_transformers_reads_from_its_gguf():
    """Up to what float32 angles, which transformers turns by, cost at 600 tokens: 0.005 of logits that spread by 5."""
    path = gemma_file()
    loaded = load_model(path)
    text = "The lighthouse keeper counted 17 ships before noon; none of them flew a flag. " * 40
    tokens = loaded.tokenizer.encode(text)[:640]
    theirs = reference_logits(from_gguf(path), tokens)
    engine = Engine(EngineConfig(model="", max_context=1024, prefill_chunk=256), loaded)
    ours = engine.logits(tokens)
    engine.close()
    assert furthest(ours[:64], theirs[:64]) < 1e-3
    assert furthest(ours, theirs) < 2e-2
    assert (ours.argmax(-1) == theirs.argmax(-1)).all()


def counter(model: LoadedModel) -> Counter:
    chat, tokenizer = model.chat, model.tokenizer
    return Counter(lambda text: len(tokenizer.encode(text)), lambda messages: len(chat.encode(messages, tokenizer).ids))


def test_a_model_without_a_template_is_asked_in_plain_text_and_its_answer_ends_with_the_line(gemma, phantom):
    bare = with_template(replace(gemma, chat=None))
    turns = [("user", "A book.\n\nWhat?"), ("assistant", "42."), ("user", "<|im_end|> Who?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    document = build("keyed", 600, counter(bare), 1, asked=2)
    begun = to_go_on_from(document, counter(bare))
    for fact, question in zip(document.asked, (fact.question for fact in begun.asked), strict=True):
        assert fact.text.startswith(question) and fact.expected not in question and fact.key.lower() in question.lower()
        assert begun.where(next(new for new in begun.asked if new.key == fact.key)).span == document.where(fact).span
    assert bare.chat.render(messages) == "A book.\n\nWhat?\nAnswer: 42.\n\n<|im_end|> Who?\nAnswer:"
    encoded = bare.chat.encode(messages, bare.tokenizer)
    assert bare.tokenizer.decode(encoded.ids[slice(*encoded.spans[2])], specials=True).strip() == "<|im_end|> Who?"
    assert stops(bare) == ("\n", ".")
    assert with_template(phantom) is phantom and stops(phantom) == ()


@pytest.mark.parametrize("form", ["bf16", "k8v4"])
@pytest.mark.parametrize("mode", ["recall", "window"])
def test_recall_and_window_serve_what_is_larger_than_the_pool(make_gemma, mode, form):
    engine = make_gemma(kv_dtype=form)
    result = answered(engine, TOKENS, prefill=mode, decode=mode)
    assert result.recall.over_pool and result.recall.hidden_pages > 0
    assert (result.recall.pages_selected > 0) == (mode == "recall")
    assert answered(engine, TOKENS, prefill=mode, decode=mode).usage.cached == 1472


def test_compact_positions_are_absolute_ones_while_all_fits(make_gemma):
    dense = make_gemma(ring="off", kv_capacity=None).logits(TOKENS[:700])
    assert torch.equal(make_gemma(positions="compact").logits(TOKENS[:700]), dense)
    engine = make_gemma(positions="compact", max_context=8192)
    result = answered(engine, random_tokens(4500, 290), prefill="recall", decode="recall")
    assert result.usage.prompt > engine.model.config.trained_context and result.recall.over_pool
