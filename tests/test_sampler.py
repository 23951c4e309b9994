"""The risk: a token is drawn that the request ruled out, or not as often as it should be. Oracle: transformers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import SamplingParams
from engine.errors import EngineError
from engine.sampler import Sampler, candidates

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1e30])


def shares(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """float32 [vocab], their sum 1."""
    found, ids = candidates(logits, params)
    dense = found if ids is None else torch.zeros_like(logits).scatter(0, ids, found)
    return dense / dense.sum()


def by_transformers(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    transformers = pytest.importorskip("transformers")
    steps = [transformers.TemperatureLogitsWarper(params.temperature)]
    steps += [transformers.TopKLogitsWarper(params.top_k)] if params.top_k else []
    steps += [transformers.TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    steps += [transformers.MinPLogitsWarper(params.min_p)] if params.min_p else []
    scores = logits[None]
    for step in steps:
        scores = step(None, scores)
    return torch.softmax(scores[0], -1)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1 << 20),
    size=st.integers(2, 400),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 5, 40, 1000]),
    top_p=st.sampled_from([0.013, 0.517, 0.953, 1.0]),
    min_p=st.sampled_from([0.0, 0.0717, 0.913]),
)
def test_what_may_be_drawn_and_how_often_is_what_transformers_says(seed, size, temperature, top_k, top_p, min_p):
    spread = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    torch.testing.assert_close(shares(spread, params), by_transformers(spread, params), atol=2e-6, rtol=1e-4)


def test_tokens_are_drawn_as_often_as_their_shares_say():
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=7)
    sampler, logits = Sampler(params, []), torch.tensor([0.0, 2.0, 1.0, -4.0])
    drawn = Counter(sampler.draw(logits).token for _ in range(4000))
    expected = shares(logits, params)
    assert set(drawn) == set(expected.nonzero()[:, 0].tolist()) == {0, 1, 2}
    for token, count in drawn.items():
        assert abs(count / 4000 - float(expected[token])) < 0.03, drawn


def test_a_seed_repeats_its_tokens_and_another_does_not():
    logits = torch.zeros(1000)

    def draws(seed):
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), [])
        return [sampler.draw(logits).token for _ in range(8)]

    assert draws(3) == draws(3) != draws(4)


def test_penalties_are_what_the_request_asked_for():
    """OpenAI's two by how often a token was drawn, forced ones too; the third also by the prompt, as transformers'."""
    transformers = pytest.importorskip("transformers")
    logits = torch.tensor([4.0, -3.0, 5.0, 1.0, 0.5])
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.5, logprobs=0)
    sampler = Sampler(params, prompt=[1, 1, 4])
    sampler.draw(logits, forced=2)
    sampler.draw(logits, forced=2)
    expected = transformers.RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([[1, 4, 2]]), logits[None].clone())[0]
    expected[2] -= 0.5 + 2 * 0.25
    torch.testing.assert_close(sampler._penalties.applied(logits), expected)
    assert sampler.draw(logits).token == int(expected.argmax()) == 0
    assert sampler.draw(logits).token == 2  # 5 / 1.5 - 0.5 - 2 x 0.25 beside 4 / 1.5 - 0.5 - 0.25


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("asked", [{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.0, "top_k": 2}])
def test_logits_that_are_not_numbers_are_an_error(wrong, asked):
    logits = LOGITS.clone()
    logits[2] = wrong
    with pytest.raises(EngineError, match="not numbers"):
        Sampler(SamplingParams(**asked), []).draw(logits)


@pytest.mark.parametrize(
    "temperature, top_p", [(5e-324, 1.0), (1e-30, 0.5), (1e-6, 5e-324), (1.0, 5e-324), (100.0, 1e-40)]
)
def test_the_smallest_numbers_draw_the_likeliest_token(temperature, top_p):
    """A denormal is 0 in float32: the draw divided by it, and an OpenAI client got a 500."""
    params = SamplingParams(temperature=temperature, top_p=top_p, seed=1)
    assert {Sampler(params, []).draw(LOGITS).token for _ in range(5)} == {1}


def test_equal_logits_leave_candidates_under_any_top_p():
    for size in (3, 7, 1000):
        assert shares(torch.zeros(size), SamplingParams(temperature=1.0, top_p=1e-6)).count_nonzero() == 1
