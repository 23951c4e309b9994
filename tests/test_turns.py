"""The risk: requests that are served together change, starve or kill each other."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import pytest

from engine.config import RecallParams, SamplingParams
from engine.errors import EngineError
from engine.result import Progress, Result, Token
from engine.runner import Runner
from engine.text.tools import spell_tools

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


def test_requests_that_outgrow_their_part_of_a_dense_pool_still_see_everything(make_engine, words):
    """They saw their part only, and answered from it: a dense engine has nothing to select with."""
    prompts = [words(1800 + 300 * n, n) for n in range(4)]
    engine = make_engine(kv_capacity=4096, reuse=False)
    assert not engine.capacity.ring
    alone = [engine.complete(engine.prepare(prompt, SHORT)).tokens for prompt in prompts]
    wide = make_engine(kv_capacity=4096, reuse=False, host_kv_bytes=4 * engine.capacity.host_bytes)
    results = drain(wide, [wide.admit(wide.prepare(prompt, SHORT)) for prompt in prompts])
    assert [result.tokens for result in results] == alone
    assert not any(result.recall.hidden_pages for result in results)


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


def test_what_requests_fetched_together_adds_up_to_what_the_engine_fetched(make_engine, words):
    engine = make_engine(reuse=False, max_context=10_000)
    sessions = [engine.admit(engine.prepare(words(2600, n), SHORT, RecallParams(prefill="window"))) for n in range(3)]
    reports = [result.recall for result in drain(engine, sessions)]
    stats = engine.stats()
    for name in ("layer_pages_fetched", "layer_pages_streamed", "bytes_fetched"):
        assert sum(getattr(report, name) for report in reports) == stats[name]
    assert all(report.layer_pages_fetched for report in reports)


def steps_of(monkeypatch):
    """Tokens that each prefill step of the engine computes, as they happen."""
    computed, real = [], Runner.step

    def counting(self, steps):
        computed.extend(len(step.tokens) for step in steps if len(step.tokens) > 1)
        return real(self, steps)

    monkeypatch.setattr(Runner, "step", counting)
    return computed


def test_a_prefix_that_several_ask_for_at_once_is_computed_and_stored_once(make_engine, words, monkeypatch):
    engine = make_engine()
    prefix = words(1280)
    asked = [f"{prefix} {words(30, n + 1)}" for n in range(4)]
    cold = make_engine(reuse=False)
    exactly = RecallParams(prefill="exact", decode="exact")
    expected = [cold.complete(cold.prepare(prompt, SHORT, exactly)).tokens for prompt in asked]
    computed = steps_of(monkeypatch)
    sessions = [engine.admit(engine.prepare(prompt, SHORT, exactly)) for prompt in asked]
    results = drain(engine, sessions)
    assert [result.tokens for result in results] == expected
    prompt = results[0].usage.prompt
    assert sum(computed) < prompt + 4 * 128 and sum(computed) == sum(result.usage.computed for result in results)
    assert [result.usage.cached >= 1216 for result in results] == [False, True, True, True]
    assert engine.stats()["host_pages_used"] <= prompt // 64 + 4


def test_who_followed_goes_on_when_the_one_ahead_is_cancelled_or_fails(make_engine, words, monkeypatch):
    engine = make_engine()
    prefix = words(1500)
    first, second, third = (engine.admit(engine.prepare(f"{prefix} {n}", SHORT)) for n in "abc")
    engine.step()
    engine.step()
    done = first.sequence.length
    assert done and not second.sequence.length and not third.sequence.length
    computed = steps_of(monkeypatch)
    engine.cancel(first)
    results = drain(engine, [second, third])
    assert [result.usage.generated for result in results] == [6, 6]
    assert results[0].usage.cached == done and results[1].usage.cached >= 1408 and sum(computed) < 1500


def test_who_followed_and_can_use_nothing_of_it_still_begins_once(make_engine, words, monkeypatch):
    """Pages of one scorer never serve another: the wait was in vain, and then its own prompt is computed, once."""
    engine = make_engine(max_context=12_000)
    computed = steps_of(monkeypatch)
    sessions = [
        engine.admit(engine.prepare(f"{words(2600)} {more}", SHORT, RecallParams(prefill="recall", scorer=scorer)))
        for scorer, more in (("token", words(1500, 2)), ("lexical", "so"))
    ]
    results = drain(engine, sessions)
    assert all(isinstance(result, Result) for result in results)
    assert sum(computed) == sum(result.usage.computed for result in results)


def test_another_conversation_does_not_wait_for_those_who_share(make_engine, words):
    engine = make_engine()
    sharing = [engine.admit(engine.prepare(f"{words(1800)} {n}", SHORT)) for n in "ab"]
    other = engine.admit(engine.prepare(words(100, 5), SHORT))
    for _ in range(3):
        engine.step()
    assert other.pending is not None and not sharing[0].pending
    drain(engine, [*sharing, other])


@pytest.mark.parametrize("seed", range(3))
def test_a_random_crowd_that_begins_alike_ends_and_breaks_no_invariant(make_engine, words, monkeypatch, seed):
    """Shared and other beginnings, tools, cancels, a failing step and a host store that is too small for all."""
    rng = Random(seed)
    engine = make_engine(max_context=rng.choice([2048, 4096]), kv_capacity=rng.choice([28, 40, 64]) * 64)
    real, alive, ended = Runner.step, [], 0

    def failing(self, steps):
        if rng.random() < 0.02:
            raise EngineError("injected")
        return real(self, steps)

    monkeypatch.setattr(Runner, "step", failing)
    for _ in range(90):
        if len(alive) < 5 and rng.random() < 0.3:
            text = words(rng.choice([100, 500, 1100]), rng.choice([1, 2])) + f" {rng.random()}"
            tools = [{"name": f"t{n}", "description": words(20, n)} for n in range(rng.choice([0, 0, 12]))]
            system = [{"role": "system", "content": spell_tools(tools)}] if tools else []
            prompt = [*system, {"role": "user", "content": text}]
            modes = RecallParams(prefill=rng.choice(["auto", "window"]))
            more = {"tools": tools} if tools else {}
            alive.append(engine.admit(engine.prepare(prompt, SHORT, modes, **more)))
        if alive and rng.random() < 0.05:
            engine.cancel(alive.pop(rng.randrange(len(alive))))
        engine.step()
        engine.audit()
        ended += sum(session.done for session in alive)
        alive = [session for session in alive if not session.done]
    assert ended > 3
    drain(engine, alive)
    assert all(session.done for session in alive)
    stats = engine.stats()
    assert stats["host_pages_used"] == stats["checkpoint_pages"]


def test_the_time_of_a_prompt_ends_when_the_device_has_computed_it(make_engine, words, monkeypatch):
    """A card's launches return at once: 131,072 tokens on an H200 were timed a second short."""
    order = []
    monkeypatch.setattr("engine.session.torch.cuda.synchronize", lambda device: order.append(f"{device} done"))
    monkeypatch.setattr("engine.session.time.perf_counter", lambda: order.append("clock") or 0.0)
    engine = make_engine()
    session = engine.admit(engine.prepare(words(30), SHORT))
    order.clear()
    session.prefilled(SimpleNamespace(is_cuda=True, device="card"))
    assert order == ["card done", "clock"]
    engine.cancel(session)
