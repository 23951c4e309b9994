"""The risk: a layer that slides sees another token than its window, or a turn resumes without what it saw."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

WINDOW = 100
SIX = {"num_hidden_layers": 6, "sliding_window": WINDOW, "max_position_embeddings": 4096, "query_pre_attn_scalar": 24}
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


@pytest.fixture(scope="module")
def oracle():
    return tiny_model("gemma3", num_key_value_heads=1, **SIX)


@pytest.fixture(scope="module")
def gemma(oracle, tmp_path_factory) -> LoadedModel:
    return load_model(save_folder(oracle, tmp_path_factory.mktemp("gemma")))


@pytest.fixture
def make(gemma: LoadedModel) -> Iterator[Callable[..., Engine]]:
    """make(kv_capacity=..., ...): a small ring over the tiny Gemma, audited at the end."""
    made: list[Engine] = []

    def build(**changes: object) -> Engine:
        wanted = {"max_context": 2048, "kv_capacity": 12 * PAGE, "prefill_chunk": 192, "sink": 64, **changes}
        made.append(Engine(EngineConfig(model="", **wanted), gemma))
        return made[-1]

    yield build
    for engine in made:
        engine.audit(deep=True)
        engine.close()


TOKENS = random_tokens(1500, 290)
"""More than a tail has room for, so that it moves its window together on the way."""


@pytest.mark.parametrize("chunk", [64, 192, 1024])
def test_the_engine_gives_the_logits_of_transformers_over_many_windows(make, oracle, chunk):
    got = make(ring="off", kv_capacity=None, prefill_chunk=chunk).logits(TOKENS)
    assert furthest(got, reference_logits(oracle, TOKENS)) < TOLERANCE


def test_a_streaming_exact_pass_gives_the_dense_logits_bit_for_bit(make):
    dense, ring = make(ring="off", kv_capacity=None), make()
    assert torch.equal(ring.logits(TOKENS, RecallParams(prefill="exact")), dense.logits(TOKENS))
    assert ring.stats()["layer_pages_streamed"] > 0


def test_decoding_says_what_transformers_says(make, oracle):
    engine = make(ring="off", kv_capacity=None)
    prepared = engine.prepare("x", SamplingParams(max_tokens=40, ignore_eos=True))
    prepared.tokens = list(TOKENS[:300])
    got = engine.complete(prepared).tokens
    logits = reference_logits(oracle, [*TOKENS[:300], *got])
    assert logits[299:-1].argmax(-1).tolist() == list(got)


def test_only_layers_that_see_everything_page(make):
    engine = make(max_context=4096)
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


def admitted(engine: Engine, tokens: list[int], answer: int = 6, **recall: object):
    """A session over these very tokens, whose last 20 are its question."""
    params = SamplingParams(max_tokens=answer, ignore_eos=True)
    prepared = engine.prepare("x", params, RecallParams(**recall))
    prepared.tokens, prepared.query = list(tokens), (len(tokens) - 20, len(tokens))
    return engine.admit(prepared)


def answered(engine: Engine, tokens: list[int], **more: object):
    """Its Result."""
    session = admitted(engine, tokens, **more)
    while not session.done:
        engine.step()
        engine.audit(deep=True)
    *_, result = session.outbox
    if isinstance(result, BaseException):
        raise result
    return result


EXACTLY = {"prefill": "exact", "decode": "exact"}


def test_a_second_turn_computes_only_its_new_tokens_and_answers_as_a_cold_run(make):
    warm, cold = make(), make(reuse=False)
    first = answered(warm, TOKENS[:900], **EXACTLY)
    follow = [*TOKENS[:900], *first.tokens, *TOKENS[900:980]]
    second = answered(warm, follow, **EXACTLY)
    assert second.usage.cached == 896
    assert second.tokens == answered(cold, follow, **EXACTLY).tokens


def test_a_turn_never_resumes_where_no_snapshot_is_and_says_what_it_computed(make):
    engine = make()
    answered(engine, TOKENS[:900], **EXACTLY)
    tails = engine._runner.tails
    tails.forget(list(tails.snapshots()))
    again = answered(engine, TOKENS[:900], **EXACTLY)
    assert again.usage.cached == 0 and again.usage.computed == 900
    assert answered(engine, TOKENS[:900], **EXACTLY).usage.cached == 896, "the pages that stood keep the new snapshot"


def test_where_prompts_part_the_third_resumes(make):
    engine, cold = make(), make(reuse=False)
    prompts = [[*TOKENS[:700], *random_tokens(200, 290, seed)] for seed in (1, 2, 3)]
    cached = [answered(engine, prompt, **EXACTLY).usage.cached for prompt in prompts[:2]]
    assert cached[0] == 0 and cached[1] < 640
    third = answered(engine, prompts[2], **EXACTLY)
    assert third.usage.cached == 640
    assert third.tokens == answered(cold, prompts[2], **EXACTLY).tokens


def test_two_at_once_share_their_prefix_and_answer_as_alone(make):
    sizes = {"max_context": 4096, "kv_capacity": 3072}
    engine, alone = make(host_kv_bytes="auto", **sizes), make(reuse=False, **sizes)
    prompts = [[*TOKENS[:700], *random_tokens(150, 290, seed)] for seed in (1, 2)]
    sessions = [admitted(engine, prompt, **EXACTLY) for prompt in prompts]
    while engine.step():
        engine.audit(deep=True)
    results = [session.outbox[-1] for session in sessions]
    assert results[1].usage.cached == 640
    for prompt, result in zip(prompts, results, strict=True):
        assert result.tokens == answered(alone, prompt, **EXACTLY).tokens


def test_a_cancel_in_the_middle_leaves_a_point_to_resume_from(make):
    engine, cold = make(), make(reuse=False)
    session = admitted(engine, TOKENS[:900], **EXACTLY)
    for _ in range(3):
        engine.step()
    done = session.sequence.length
    engine.cancel(session)
    engine.audit(deep=True)
    result = answered(engine, TOKENS[:900], **EXACTLY)
    assert result.usage.cached == done // PAGE * PAGE > 0
    assert result.tokens == answered(cold, TOKENS[:900], **EXACTLY).tokens


def test_a_step_that_fails_in_a_sliding_layer_changes_nothing(make, monkeypatch):
    from engine import runner

    engine, cold = make(), make(reuse=False)
    session = admitted(engine, TOKENS[:900], **EXACTLY)
    engine.step()
    engine.step()
    calls, real = [], runner.attend_window

    def failing(*arguments: object):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("as it was told to")
        return real(*arguments)

    monkeypatch.setattr(runner, "attend_window", failing)
    engine.step()
    engine.audit(deep=True)
    assert session.done and isinstance(session.outbox[-1], RuntimeError)
    result = answered(engine, TOKENS[:900], **EXACTLY)
    assert result.usage.cached == 384
    assert result.tokens == answered(cold, TOKENS[:900], **EXACTLY).tokens


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


def test_a_plan_counts_pages_of_layers_that_see_everything_and_tails_of_the_others(make):
    shape = shape_of("gemma-3-12b")
    card = Place("a card", 64 << 30, 24 << 30, torch.bfloat16, "")
    plan = make_plan(shape, card, EngineConfig(model=""), weight_bits=4.5)
    capacity = plan.capacity
    assert plan.kv.token_bytes == 2 * 8 * 8 * 256 * 2
    assert capacity.device_bytes - capacity.weight_bytes - capacity.pool_bytes > capacity.tail_bytes
    assert capacity.tail_bytes > TAILS * 1024 * 40 * 2 * 8 * 256 * 2
    engine = make()
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
    loaded, oracle = load_model(path), from_gguf(path)
    text = "The lighthouse keeper counted 17 ships before noon; none of them flew a flag. " * 40
    tokens = loaded.tokenizer.encode(text)[:640]
    theirs = reference_logits(oracle, tokens)
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
def test_recall_and_window_serve_what_is_larger_than_the_pool(make, mode, form):
    engine = make(kv_dtype=form)
    result = answered(engine, TOKENS, prefill=mode, decode=mode)
    assert result.recall.over_pool and result.recall.hidden_pages > 0
    assert (result.recall.pages_selected > 0) == (mode == "recall")
    assert answered(engine, TOKENS, prefill=mode, decode=mode).usage.cached == 1472


def test_compact_positions_are_absolute_ones_while_all_fits(make):
    dense = make(ring="off", kv_capacity=None).logits(TOKENS[:700])
    assert torch.equal(make(positions="compact").logits(TOKENS[:700]), dense)
    engine = make(positions="compact", max_context=8192)
    result = answered(engine, random_tokens(4500, 290), prefill="recall", decode="recall")
    assert result.usage.prompt > engine.model.config.trained_context and result.recall.over_pool


def test_where_kernels_would_serve_it_says_that_torch_does(gemma):
    pytest.importorskip("triton", reason="triton has no wheel here")
    from engine.triton_runner import TritonCandidate

    backends = (lambda runner: TritonCandidate(runner, (9, 0)),)
    engine = Engine(EngineConfig(model="", max_context=512), gemma, backends=backends)
    assert engine.backend.name == "torch-cpu" and "layers that slide" in engine.degraded
    engine.close()
