"""The risk: a turn of a model with sliding layers resumes without what it saw, or where it never was."""

from __future__ import annotations

from engine.config import PAGE
from tests.models import random_tokens
from tests.sliding import TOKENS, admitted, answered

EXACTLY = {"prefill": "exact", "decode": "exact"}


def test_a_second_turn_computes_only_its_new_tokens_and_answers_as_a_cold_run(make_gemma):
    warm, cold = make_gemma(), make_gemma(reuse=False)
    first = answered(warm, TOKENS[:900], **EXACTLY)
    follow = [*TOKENS[:900], *first.tokens, *TOKENS[900:980]]
    second = answered(warm, follow, **EXACTLY)
    assert second.usage.cached == 896
    assert second.tokens == answered(cold, follow, **EXACTLY).tokens


def test_a_turn_never_resumes_where_no_snapshot_is_and_says_what_it_computed(make_gemma):
    engine = make_gemma()
    answered(engine, TOKENS[:900], **EXACTLY)
    tails = engine._runner.tails
    tails.forget(list(tails.snapshots()))
    again = answered(engine, TOKENS[:900], **EXACTLY)
    assert again.usage.cached == 0 and again.usage.computed == 900
    assert answered(engine, TOKENS[:900], **EXACTLY).usage.cached == 896, "the pages that stood keep the new snapshot"


def test_where_prompts_part_the_third_resumes(make_gemma):
    engine, cold = make_gemma(), make_gemma(reuse=False)
    prompts = [[*TOKENS[:700], *random_tokens(200, 290, seed)] for seed in (1, 2, 3)]
    cached = [answered(engine, prompt, **EXACTLY).usage.cached for prompt in prompts[:2]]
    assert cached[0] == 0 and cached[1] < 640
    third = answered(engine, prompts[2], **EXACTLY)
    assert third.usage.cached == 640
    assert third.tokens == answered(cold, prompts[2], **EXACTLY).tokens


def test_two_at_once_share_their_prefix_and_answer_as_alone(make_gemma):
    sizes = {"max_context": 4096, "kv_capacity": 3072}
    engine, alone = make_gemma(host_kv_bytes="auto", **sizes), make_gemma(reuse=False, **sizes)
    prompts = [[*TOKENS[:700], *random_tokens(150, 290, seed)] for seed in (1, 2)]
    sessions = [admitted(engine, prompt, **EXACTLY) for prompt in prompts]
    while engine.step():
        engine.audit(deep=True)
    results = [session.outbox[-1] for session in sessions]
    assert results[1].usage.cached == 640
    for prompt, result in zip(prompts, results, strict=True):
        assert result.tokens == answered(alone, prompt, **EXACTLY).tokens


def test_a_cancel_in_the_middle_leaves_a_point_to_resume_from(make_gemma):
    engine, cold = make_gemma(), make_gemma(reuse=False)
    session = admitted(engine, TOKENS[:900], **EXACTLY)
    for _ in range(3):
        engine.step()
    done = session.sequence.length
    engine.cancel(session)
    engine.audit(deep=True)
    result = answered(engine, TOKENS[:900], **EXACTLY)
    assert result.usage.cached == done // PAGE * PAGE > 0
    assert result.tokens == answered(cold, TOKENS[:900], **EXACTLY).tokens


def test_a_step_that_fails_in_a_sliding_layer_changes_nothing(make_gemma, monkeypatch):
    from engine import runner

    engine, cold = make_gemma(), make_gemma(reuse=False)
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
