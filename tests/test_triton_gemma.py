"""The risk: a step that the device drives, or a chunk that streams, shows a layer that slides something else.

The tiny Gemma of tests/sliding.py, of which one layer pages and five slide, under Triton's interpreter or on a card:
held against the torch runner and, where all pages are seen, against transformers.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton has no wheel here")

from engine import driven, self_check
from engine.config import EngineConfig, RecallParams
from engine.engine import Engine
from engine.kv.page import KVShape
from engine.model.load import load_model
from engine.triton_runner import TritonRunner
from tests.interpreted import CUDA, Interpreted, Patient
from tests.models import furthest, random_tokens, reference_logits, save_folder
from tests.sliding import TOKENS, WINDOW, admitted, answered, oracle

EXACTLY = {"prefill": "exact", "decode": "exact"}
NEAR = 2e-3 if CUDA else 2e-4


class Streams(Patient):
    streams_from = 7


class Streaming(Interpreted):
    runner_type = TritonRunner if CUDA else Streams


@pytest.fixture(scope="module")
def model(gemma, tmp_path_factory):
    if not CUDA:
        return gemma
    return load_model(save_folder(oracle(), tmp_path_factory.mktemp("gemma")), torch.device("cuda"), torch.float32)


@pytest.fixture
def make(model, monkeypatch):
    """make(*backends, **settings): engines, all audited in the end."""
    if not CUDA:
        monkeypatch.setattr(driven, "QUESTION_CHUNK", 40)  # chunks of more take long
    made: list[Engine] = []

    def make(*backends, **settings) -> Engine:
        usual = {"max_context": 1024, "kv_capacity": 448, "prefill_chunk": 64, "sink": 64}
        made.append(Engine(EngineConfig(model="", **{**usual, **settings}), model, backends=backends))
        return made[-1]

    yield make
    for engine in made:
        engine.audit(deep=True)
        engine.close()


def steps(engine: Engine, of: str) -> int:
    return sum(count for name, count in engine.stats()["steps_by"].items() if of in name)


def test_chunks_that_stream_give_the_logits_of_transformers_over_many_windows(make):
    """The last two, of 64 tokens and of 8, which find cold pages; without a card those before them are torch's."""
    engine, tokens = make(Streaming), TOKENS[:520]
    got = engine.logits(tokens, RecallParams(prefill="exact"))
    assert len(tokens) > 5 * WINDOW and steps(engine, "streamed") == (9 if CUDA else 2)
    assert furthest(got.cpu(), reference_logits(oracle(), tokens)) < NEAR
    torch.testing.assert_close(got, make().logits(tokens, RecallParams(prefill="exact")), atol=NEAR, rtol=NEAR)


def test_a_token_at_a_time_over_a_page_border_says_what_transformers_says(make):
    engine = make(Interpreted, kv_capacity=None, ring="off")
    result = answered(engine, TOKENS[:250], answer=16)
    logits = reference_logits(oracle(), [*TOKENS[:250], *result.tokens])
    assert steps(engine, "device-driven") == 15
    assert logits[249:-1].argmax(-1).tolist() == list(result.tokens)


@pytest.mark.parametrize("how", [{"prefill": "recall", "decode": "recall"}, EXACTLY])
def test_over_the_pool_it_answers_as_torch_does(make, how):
    torch_engine, engine = make(), make(Interpreted)
    for tokens in (TOKENS[:700], [*TOKENS[:700], *random_tokens(30, 290)]):  # and a further turn
        wanted, got = (answered(each, tokens, **how) for each in (torch_engine, engine))
        assert got.tokens == wanted.tokens and got.recall.over_pool
        assert got.usage.cached == wanted.usage.cached
    assert steps(engine, "device-driven") >= 10 and got.usage.cached >= 640


def test_after_a_cancel_it_resumes_and_answers_as_if_nothing_had_been(make):
    torch_engine, engine = make(reuse=False), make(Interpreted)
    session = admitted(engine, TOKENS[:508], answer=80, **EXACTLY)
    while len(session.result().tokens) < 8:
        engine.step()
    engine.cancel(session)
    engine.audit(deep=True)
    whole = [*TOKENS[:508], *session.result().tokens, *TOKENS[508:520]]
    result = answered(engine, whole, **EXACTLY)
    assert result.usage.cached == 512 and steps(engine, "device-driven") > 8
    assert result.tokens == answered(torch_engine, whole, **EXACTLY).tokens


def test_two_in_turns_keep_their_own_tails(make):
    """Whose tail a step reads is told anew for each: they are at different places of tails at different addresses."""
    sizes = {"max_context": 2048, "kv_capacity": 1536, "prefill_chunk": 256}
    results = []
    for engine in (make(**sizes), make(Interpreted, **sizes)):
        prompts = [TOKENS[:300], TOKENS[700:830]]
        sessions = [admitted(engine, prompt, answer=6) for prompt in prompts]
        while engine.step():
            engine.audit()
        results.append([session.result().tokens for session in sessions])
    assert results[0] == results[1] and steps(engine, "device-driven") == 10


def test_the_check_at_the_start_finds_a_window_that_is_one_token_off(model, monkeypatch):
    config = model.config
    shape = KVShape(len(config.paged), config.kv_heads, config.head_dim, model.transformer.dtype)
    assert self_check.self_check(model.transformer, shape) == ""
    right = self_check.attend_window
    monkeypatch.setattr(self_check, "attend_window", lambda q, k, v, window, scale: right(q, k, v, window - 1, scale))
    assert "sliding attention" in self_check.self_check(model.transformer, shape)
