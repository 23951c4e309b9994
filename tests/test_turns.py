"""The risk: requests that are served together change, starve or kill each other."""

from __future__ import annotations

import pytest

from engine.config import RecallParams, SamplingParams
from engine.errors import EngineError
from engine.result import Progress, Result, Token
from engine.runner import Runner

SHORT = SamplingParams(max_tokens=6, ignore_eos=True)


def drain(engine, sessions):
    """Step until all have ended, auditing each turn; the last event of each."""
    last = {}
    for _ in range(2000):
        busy = engine.step()
        engine.audit()
        for session in sessions:
            while session.outbox:
                last[id(session)] = session.outbox.popleft()
        if not busy:
            break
    return [last[id(session)] for session in sessions]


def test_four_requests_at_once_answer_as_each_does_alone(make_engine, words):
    exactly = RecallParams(prefill="exact", decode="exact")
    prompts = [words(300 + 200 * n, n) for n in range(4)] + [words(2400, 9)]
    alone = make_engine(reuse=False, max_context=8192)
    expected = [alone.complete(alone.prepare(prompt, SHORT, exactly)).tokens for prompt in prompts]
    engine = make_engine(reuse=False, max_context=8192)
    sessions = [engine.admit(engine.prepare(prompt, SHORT, exactly)) for prompt in prompts]
    results = drain(engine, sessions)
    assert all(isinstance(result, Result) for result in results)
    assert [result.tokens for result in results] == expected
    assert engine.stats()["host_pages_used"] == 0


def test_answers_share_a_pass_over_the_weights(make_engine, words, monkeypatch):
    engine = make_engine()
    sessions = [engine.admit(engine.prepare(words(100, n), SHORT)) for n in range(4)]
    widths = []
    real = Runner.step

    def counting(self, steps):
        widths.append(len(steps))
        return real(self, steps)

    monkeypatch.setattr(Runner, "step", counting)
    drain(engine, sessions)
    assert max(widths) >= 3


def test_a_long_prompt_does_not_starve_a_short_one(make_engine, words):
    engine = make_engine()
    long = engine.admit(engine.prepare(words(2400), SHORT, RecallParams(prefill="exact")))
    for _ in range(2):
        engine.step()
    short = engine.admit(engine.prepare(words(50, 1), SHORT))
    for turn in range(30):  # noqa: B007
        engine.step()
        if any(isinstance(event, Result) for event in short.outbox):
            break
    assert turn < 12 and not long.done
    assert isinstance(drain(engine, [long])[0], Result)


def test_an_error_ends_the_request_that_caused_it_and_no_other(make_engine, words, monkeypatch):
    engine = make_engine()
    good, bad = (engine.admit(engine.prepare(words(200, n), SHORT)) for n in range(2))
    real = Runner.step

    def failing(self, steps):
        if any(step.sequence is bad.sequence and step.sequence.length >= 200 for step in steps):
            raise EngineError("injected")
        return real(self, steps)

    monkeypatch.setattr(Runner, "step", failing)
    kept, lost = drain(engine, [good, bad])
    assert isinstance(kept, Result) and isinstance(lost, EngineError)
    assert engine.complete(engine.prepare(words(100), SHORT)).usage.generated == 6


def test_a_cancel_frees_what_it_held_while_others_go_on(make_engine, words):
    engine = make_engine(reuse=False)
    stays, goes = (engine.admit(engine.prepare(words(800, n), SHORT)) for n in range(2))
    for _ in range(5):
        engine.step()
    engine.cancel(goes)
    engine.audit(deep=True)
    assert goes.done and not stays.done
    events = list(stays.outbox)
    assert any(isinstance(event, Progress) for event in events) and not any(isinstance(e, Token) for e in goes.outbox)
    assert isinstance(drain(engine, [stays])[0], Result)
    assert engine.stats()["host_pages_used"] == 0


@pytest.mark.parametrize("requests", [2, 3, 5])
def test_the_shares_of_the_pool_leave_room_for_everybody(make_engine, words, requests):
    engine = make_engine(kv_capacity=40 * 64, max_context=10_000)
    window = RecallParams(prefill="window")
    sessions = [engine.admit(engine.prepare(words(1500, n), SHORT, window)) for n in range(requests)]
    results = drain(engine, sessions)
    assert all(isinstance(result, Result) for result in results), results
