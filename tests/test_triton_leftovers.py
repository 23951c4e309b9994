"""The risk: a step that fails, a request that ends or an engine that closes leaves something behind on the device.

A slot that holds no page, a copy that is waited for, a stream that nobody joins; weights that stay beside the next
model's. Under Triton's interpreter where there is no card.
"""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton has no wheel here")

from engine.config import EngineConfig, SamplingParams
from engine.driven import DrivenSteps
from engine.engine import Engine
from engine.errors import EngineError
from engine.ferry import Ferry
from engine.step_graph import Beside, StepGraph
from tests.interpreted import CUDA, TEXT, Interpreted, answer, loaded, pairs


@pytest.fixture
def pair():
    yield from pairs()


def test_an_engine_that_is_let_go_is_gone_at_once_and_holds_no_model():
    """Found on a card: what waits for Python to collect it stands beside the next model, and frozen it never goes."""
    config = EngineConfig(model="", max_context=1024, prefill_chunk=128, sink=64, kv_capacity=768)
    gc.collect()
    gc.disable()
    try:
        for backends in ((), (Interpreted,)):
            engine = Engine.load(config, loaded("tiny"), backends=backends)
            engine.complete(engine.prepare(TEXT[:900], SamplingParams(max_tokens=2, ignore_eos=True)))
            by = engine.stats()["steps_by"]
            assert any("device-driven" in name for name in by) == bool(backends), by
            parts = [weakref.ref(part) for part in (engine, engine._runner, engine._runner.transfer, engine._host)]
            engine.close()
            del engine
            assert [part() for part in parts] == [None] * len(parts)
    finally:
        gc.enable()


def test_a_page_that_cannot_be_brought_is_in_no_slot(pair, monkeypatch):
    monkeypatch.setattr(DrivenSteps, "in_place", False)
    torch_engine, engine = pair(kv_capacity=768)
    wanted = answer(torch_engine).tokens
    gather, calls = Ferry._gather, [0]

    def failing(self, layer, first):
        calls[0] += 1
        if calls[0] == 3:
            raise RuntimeError("stopped half-way")
        gather(self, layer, first)

    engine._runner.driven.graphs.wanted = False  # while it is captured, a failure is one of the capture
    monkeypatch.setattr(Ferry, "_gather", failing)
    with pytest.raises(RuntimeError, match="half-way"):
        answer(engine)
    engine.audit(deep=True)
    engine.forget()
    assert answer(engine).tokens == wanted


def test_a_step_that_fails_half_way_leaves_the_tables_true(pair, monkeypatch):
    torch_engine, engine = pair(kv_capacity=768)
    wanted = answer(torch_engine).tokens
    driven = engine._runner.driven
    driven.graphs.wanted = False
    attend, calls = driven.launches._attend, [0]

    def failing(kind, layer, q, k, v):
        calls[0] += 1
        if calls[0] == 4:
            raise RuntimeError("stopped half-way")
        return attend(kind, layer, q, k, v)

    monkeypatch.setattr(driven.launches, "_attend", failing)
    with pytest.raises(RuntimeError, match="half-way"):
        answer(engine)
    engine.audit(deep=True)
    engine.forget()
    assert answer(engine).tokens == wanted


def test_a_request_takes_the_slots_of_one_that_ended_in_the_step_before(pair):
    """Alone it fits in the pool: all its pages come back, where the other's were used last."""
    results = []
    for engine in pair(kv_capacity=512):
        sessions = []
        for word, tokens in (("keeper", 5), ("river", 2)):
            prepared = engine.prepare(f"{word}: " + TEXT[:340], SamplingParams(max_tokens=tokens, ignore_eos=True))
            sessions.append(engine.admit(prepared))
        while engine.step():
            pass
        assert not [event for session in sessions for event in session.outbox if isinstance(event, BaseException)]
        results.append([session.result().tokens for session in sessions])
    assert results[0] == results[1]


def test_a_step_whose_pages_may_not_all_stay_is_an_error(pair):
    """A new page without a slot would be written before the pool's first byte."""
    _, engine = pair(kv_capacity=768)
    session = engine.admit(engine.prepare(TEXT[:316], SamplingParams(max_tokens=8, ignore_eos=True)))
    while session.pending is None:
        engine.step()
    pool = engine._runner.pool
    unused = np.flatnonzero(engine._runner.host.references == 0)[-8:]
    pool.pinned[unused] = True  # as if their copies were under way
    pool.page_in[:, -8:], pool.slot_of[:, unused] = unused, np.arange(pool.slots - 8, pool.slots)
    while not session.done:
        engine.step()
    errors = [event for event in session.outbox if isinstance(event, EngineError)]
    pool.drop(unused.tolist())
    assert errors and "may not move" in str(errors[0])


def test_copies_of_what_is_seen_anyway_are_not_waited_for(pair, monkeypatch):
    """Pages on their way to the host hold no slots beside those that the step needs: a first token would wait 45 ms."""
    _, engine = pair(kv_capacity=768)
    session = engine.admit(engine.prepare(TEXT[:560], SamplingParams(max_tokens=9, ignore_eos=True)))
    while session.pending is None:
        engine.step()
    pool, transfer = engine._runner.pool, engine._runner.transfer
    past = session.sequence.pages[:-1]
    assert len(past) > pool.slots // 2
    pool.pinned[past] = True  # as if their copies were under way
    with monkeypatch.context() as patch:
        patch.setattr(transfer, "settle", lambda wait=False: pytest.fail("it waits") if wait else None)
        engine.step()
    pool.pinned[past] = False
    engine.cancel(session)


def test_what_runs_beside_a_step_is_waited_for_when_the_step_fails(monkeypatch):
    """Its buffers are the next step's, and a capture with work that nobody joined can't be ended."""
    order = []

    class Stream:
        def __init__(self, name) -> None:
            self.name = name

        def wait_stream(self, other) -> None:
            order.append(f"{self.name} waits for {other.name}")

    main = Stream("main")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    with pytest.raises(RuntimeError), Beside(torch.device("cuda")).running(lambda: order.append("work")):
        raise RuntimeError("stopped half-way")
    assert order == ["side waits for main", "work", "main waits for side"]


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="a thousand cancels; test_turns has the torch runner's")
def test_cancels_at_random_leave_no_trace(pair):
    random = np.random.default_rng(5)
    _, engine = pair(kv_capacity=768)
    wanted = answer(engine).tokens
    for _ in range(1000):
        text = TEXT[: int(random.integers(900, 1900))]
        prepared = engine.prepare(text, SamplingParams(max_tokens=4, ignore_eos=True))
        session = engine.admit(prepared)
        for _ in range(int(random.integers(0, 9))):
            engine.step()
        engine.cancel(session)
        engine.audit(deep=True)
    engine.forget()
    assert answer(engine).tokens == wanted


def test_captures_share_a_stream(monkeypatch):
    """cuBLAS never gives back a stream's workspace: each engine of a sweep left 95 MiB on an H200."""
    made = []

    class Fake:
        def __init__(self, *more, **named) -> None:
            made.append(self)

        def wait_stream(self, other) -> None: ...

    class Graph:
        def capture_begin(self, **named) -> None: ...

        def capture_end(self) -> None: ...

    cuda = {"synchronize": lambda: None, "graph_pool_handle": lambda: (0, 1), "current_device": lambda: 7}
    for name, value in {**cuda, "Stream": Fake, "stream": nullcontext, "CUDAGraph": Graph}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Fake)
    monkeypatch.setattr(Fake, "wait_stream", lambda *_: None)
    for _ in range(3):
        StepGraph().capture(lambda: 5)
    assert len(made) == 1
