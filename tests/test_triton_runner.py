"""The risk: the device drives a step and sees other pages, or other bytes, than the host would have shown it.

Runs the whole path under Triton's interpreter with the phantom: every step's logits and windows are held against the
torch runner's.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton has no wheel here")

from engine import driven, launches
from engine.config import EngineConfig, RecallParams, SamplingParams
from engine.driven import DrivenSteps
from engine.engine import Engine
from engine.kv.share import WindowBudget
from engine.launches import Kind
from engine.layout import lay_out
from engine.ops import geometry as g
from engine.ops import triton_moves
from engine.recall.recall import Recall, RecallSettings
from engine.recall.window import span
from engine.staged import StagedChunk
from engine.step_graph import KINDS, StepGraphs
from engine.triton_runner import TritonRunner
from kvring_cli.server.log import ready_lines
from tests.interpreted import CUDA, TEXT, Interpreted, Patient, answer, loaded, pairs


@pytest.fixture
def pair():
    yield from pairs()


class Streams(Patient):
    streams_from = 7


class Streaming(Interpreted):
    runner_type = TritonRunner if CUDA else Streams


def selected(result) -> set[tuple[int, str]]:
    return {(index, reason) for index, page in enumerate(result.pages) for reason in page.steps}


@pytest.mark.parametrize(
    ("settings", "model", "config"),
    [
        ({}, "phantom", {}),
        ({}, "phantom", {"kv_dtype": "k8v4"}),
        ({}, "tiny", {"far_heads": 50}),
        ({"decode": "window"}, "phantom", {}),
        ({"decode": "exact"}, "phantom", {"kv_dtype": "k8v4"}),
    ],
)
def test_the_device_sees_and_says_what_the_host_does(pair, settings, model, config):
    torch_engine, triton_engine = pair(model, kv_capacity=768, **config)
    wanted, got = answer(torch_engine, **settings), answer(triton_engine, **settings)
    assert got.tokens == wanted.tokens and got.recall.over_pool
    same, either = selected(got) & selected(wanted), selected(got) | selected(wanted)
    assert len(same) >= 0.8 * len(either), (selected(got), selected(wanted))
    for name in ("hidden_pages", "selections", "pages_selected"):
        assert getattr(got.recall, name) == getattr(wanted.recall, name), name
    by = triton_engine.stats()["steps_by"]
    assert by["device-driven, eager"] + by.get("device-driven, graph", 0) >= 2, by


@pytest.mark.parametrize(("kv_dtype", "near"), [("auto", 2e-3), pytest.param("int8", 2e-2, marks=pytest.mark.slow)])
def test_large_chunks_stream_cold_pages_and_agree(kv_dtype, near):
    """The chunks that the pool has room for are torch's; the last two find cold pages, and are streamed."""
    config = EngineConfig(model="", max_context=768, prefill_chunk=64, sink=64, kv_capacity=448, kv_dtype=kv_dtype)
    tokens = loaded("tiny").tokenizer.encode(TEXT)[:540]
    logits, streamed = [], []
    for backends in ((), (Streaming,)):
        engine = Engine.load(config, loaded("tiny"), backends=backends)
        logits.append(engine.logits(tokens, RecallParams(prefill="exact")))
        streamed.append(engine.stats()["layer_pages_streamed"])
        engine.audit(deep=True)
        engine.close()
    torch.testing.assert_close(logits[1], logits[0], atol=near, rtol=2e-3)
    assert streamed[0] == streamed[1] > 0 and engine.stats()["steps_by"]["streamed"] == (9 if CUDA else 2)


def test_no_kernel_is_given_host_memory_that_it_cannot_reach(pair, monkeypatch):
    """Triton refuses a pageable tensor, even where no page of it would be read: gate lossless found it on a card."""
    _, engine = pair(kv_capacity=768)
    answer(engine)
    runner, given = engine._runner, []
    monkeypatch.setattr(type(runner.stager), "in_place", False)
    monkeypatch.setattr(triton_moves, "stage", lambda pool, host, *rest: given.append(host.data_ptr()))
    cached = np.array(engine._prefix.pages())
    resident = cached[(runner.pool.slot_of[:, cached] >= 0).all(0)]
    StagedChunk(runner.stager, len(resident), resident, np.arange(len(resident)), 0, 0)._stage(0, 0, len(resident))
    assert len(resident) and given == [runner.pool.data[0].data_ptr()]


@pytest.mark.parametrize("positions", ["absolute", "compact"])
def test_every_step_attends_to_what_is_fixed_and_what_was_chosen_for_it(pair, monkeypatch, positions):
    """In compact positions the newest pages were once lost from a page's second token on, and another seen twice."""
    torch_engine, engine = pair(kv_capacity=768, positions=positions)
    step, steady = DrivenSteps.step, []

    def checked(self, frame):
        logits, layout, ids = step(self, frame), self._layout, self.launches.ids.cpu().numpy()
        slot_of = self.tables.device.slot_of.cpu().numpy()
        for layer, window in enumerate(self.launches.windows[:, : layout.window].tolist()):
            chosen = np.flatnonzero(self.launches.why[layer, : frame.past].cpu().numpy())
            assert sorted(window) == sorted({*layout.fixed.tolist(), *chosen.tolist()})
            assert positions == "absolute" or window == sorted(window)
            assert (slot_of[layer, ids[window]] >= 0).all()
        steady.append(int(self.launches.state.geometry[g.STEADY]))
        return logits

    monkeypatch.setattr(DrivenSteps, "step", checked)
    got = answer(engine)
    assert got.recall.over_pool and steady[-1] == 1 and not all(steady)
    assert got.tokens == answer(torch_engine).tokens


@pytest.mark.parametrize("held", [launches.HYSTERESIS, 0.0])
def test_attending_ahead_of_the_choice_changes_no_bit(pair, monkeypatch, held):
    """Where scores choose the same pages again, and where what is held is worth nothing, so that they choose others."""
    step, logits, changed = DrivenSteps.step, {True: [], False: []}, []
    monkeypatch.setattr(launches, "HYSTERESIS", held)
    monkeypatch.setattr(launches, "WORTH", 0.0)

    def kept(self, frame):
        logits[ahead].append(step(self, frame).clone())
        changed.append((int(self.launches.state.geometry[g.STEADY]), *self.launches.restless[:, 0].tolist()))
        return logits[ahead][-1]

    monkeypatch.setattr(DrivenSteps, "step", kept)
    for ahead in logits:
        monkeypatch.setattr(Kind, "ahead", property(lambda kind, ahead=ahead: ahead and kind.scored))
        _, engine = pair(kv_capacity=768)
        answer(engine)
    assert all(map(torch.equal, *logits.values())) and ((1, 0, 0) if held else (1, 1, 1)) in changed


def test_what_the_host_brings_is_what_kernels_would_have_read(pair, monkeypatch):
    _, engine = pair(kv_capacity=768)
    wanted = answer(engine)
    monkeypatch.setattr(DrivenSteps, "in_place", False)
    _, engine = pair(kv_capacity=768)
    got = answer(engine)
    assert (got.tokens, selected(got)) == (wanted.tokens, selected(wanted))
    for name in ("layer_pages_fetched", "bytes_fetched"):
        assert getattr(got.recall, name) == getattr(wanted.recall, name) > 0, name
    assert engine.stats()["fetch_seconds"] > 0
    assert [name for name in engine.stats()["steps_by"] if "misses by the host" in name]


@pytest.mark.parametrize("setting", ["on", "off"])
def test_everything_fits_and_a_second_turn_comes_back_from_the_host(pair, monkeypatch, setting):
    if not CUDA:
        monkeypatch.setattr("engine.step_graph.StepGraph", Recorded)
        monkeypatch.setattr("engine.step_graph.ROWS", 8)
    _, engine = pair(kv_capacity=2048, cuda_graph=setting)
    engine._runner.driven.graphs.wanted = engine._runner.captures
    prompt, sampling, recall = TEXT[:260], SamplingParams(max_tokens=2, ignore_eos=True), RecallParams(explain=True)
    first = engine.complete(engine.prepare(prompt, sampling))
    other = engine.complete(engine.prepare("Something else. " * 20, sampling))
    for layer in range(engine.model.config.layers):  # as if others had needed the slots meanwhile
        engine._runner.pool.page_in[layer] = -1
        engine._runner.pool.slot_of[layer] = -1
    again = engine.complete(engine.prepare(prompt, sampling, recall))
    assert again.tokens == first.tokens and again.usage.cached == 256 and not other.recall.over_pool
    assert again.recall.layer_pages_fetched == 4 * engine.model.config.layers
    assert [page.fetched for page in again.pages] == [True] * 4 + [False]


def test_what_a_step_fetched_that_failed_is_not_told_of_the_next_request(pair, monkeypatch):
    monkeypatch.setattr(driven, "QUESTION_CHUNK", 1)  # tokens of the answer are enough
    _, engine = pair(kv_capacity=576)
    prompt, sampling = TEXT[:650], SamplingParams(max_tokens=2, ignore_eos=True)
    engine.complete(engine.prepare(prompt, sampling))
    told = engine.stats()["layer_pages_fetched"]

    def failing(self, *_):
        self.state.counters[g.FETCHED] += 100
        raise RuntimeError("a launch failed")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a launch failed"):
        patch.setattr(launches.Launches, "_attend", failing)
        engine.complete(engine.prepare(prompt, sampling))
    result = engine.complete(engine.prepare(prompt, sampling))
    assert result.recall.over_pool and result.recall.layer_pages_fetched < 100
    assert engine.stats()["layer_pages_fetched"] >= told + 100 and "device-driven, eager" in engine.stats()["steps_by"]


def test_answers_in_turn_keep_their_own_windows(pair):
    torch_engine, engine = pair(kv_capacity=1280)
    results = []
    for each in (torch_engine, engine):
        sessions = []
        for word in ("keeper", "river"):
            text = TEXT[:1400] + f"\nWhat did the {word} write?"
            sessions.append(each.admit(each.prepare(text, SamplingParams(max_tokens=3, ignore_eos=True))))
        while each.step():
            each.audit()
        results.append([session.result().tokens for session in sessions])
    assert results[0] == results[1]


def test_pages_count_as_selected_only_in_the_steps_that_selected_them(pair):
    """Told of what lexical recall took alone; not again in every step of a window that selects nothing."""
    text, told = TEXT[:250] + "A zebra ate 4711 apples. " + TEXT[:285] + "\nWhat did a zebra eat?", []
    for engine in pair(kv_capacity=512):
        results = []
        for settings in ({"scorer": "lexical"}, {"prefill": "recall", "decode": "window"}):
            sampling = SamplingParams(max_tokens=2, ignore_eos=True)
            results.append(engine.complete(engine.prepare(text, sampling, RecallParams(explain=True, **settings))))
        told.append([sum(page.selected for page in result.pages) for result in results])
    assert told[0] == told[1] and all(told[0])


@pytest.mark.parametrize(("requests", "past", "own"), [(1, 30, 1), (2, 30, 2), (4, 3, 1), (6, 9, 1), (3, 9, 3)])
def test_however_small_a_share_is_what_is_always_seen_is_seen(requests, past, own):
    """With a page for each of many requests there was less than no room to select: a window lost its newest page."""
    budget = WindowBudget(pool=6, sink=1, selection=2, recent=2, free=1).part(requests)
    recall = Recall(RecallSettings("token", budget=2, neighbors=1, query_tail=64), *[None] * 4)
    step = SimpleNamespace(recall=recall, mode="recall", budget=budget)
    layout = lay_out(SimpleNamespace(step=step, past=past, own=range(own), identity=False))
    room = min(2, budget.pool - budget.free - budget.always - own - 1)
    assert layout.fixed.tolist() == span(past, own, budget, room).window(np.arange(0)).tolist()
    assert layout.fixed[-1] == past - 1 and layout.window == len(layout.fixed) + max(0, room)


def test_graphs_that_cannot_be_captured_are_said(pair):
    _, engine = pair(kv_capacity=2048)
    assert engine.degraded == engine.stats()["backend_degraded"] == ""
    engine._runner.driven.graphs.failure = "CUDA graph capture failed: out of memory"
    assert "capture failed" in engine.stats()["backend_degraded"] and "capture failed" in engine.degraded
    assert engine.stats()["cuda_graph"] == "failed" and any("capture failed" in line for line in ready_lines(engine, 1))


class Recorded:
    """Stands for StepGraph where there is no card: `replay` does what was captured."""

    def __init__(self, pool=None):
        self.pool = pool

    def capture(self, step):
        self._step = step

    def replay(self):
        return self._step()


@pytest.mark.parametrize(("failing", "runs"), [(1, ["eager", "graph", "graph"]), (2, ["eager", "eager", "eager"])])
def test_a_capture_that_fails_is_tried_again_once(failing, runs, monkeypatch):
    """Some Windows cards fail at random; what a step computes is the same either way."""
    left = [failing]

    class Failing(Recorded):
        def capture(self, step):
            left[0] -= 1
            if left[0] >= 0:
                raise RuntimeError("operation failed\ndue to a previous error")
            super().capture(step)

    monkeypatch.setattr("engine.step_graph.StepGraph", Failing)
    graphs = StepGraphs(True)
    assert [graphs.run("a kind", lambda: 7) for _ in range(3)] == [(7, how) for how in runs]
    assert [graphs.run("another kind", lambda: 8)[1] for _ in range(2)] == runs[:2]
    assert graphs.failure == (
        "" if failing == 1 else "CUDA graph capture failed: operation failed due to a previous error"
    )


def test_the_graph_in_use_outlives_those_of_steps_long_past(monkeypatch):
    """With as many lengths of turns as graphs are kept, each token's graph was dropped, and captured anew."""
    monkeypatch.setattr("engine.step_graph.StepGraph", Recorded)
    graphs = StepGraphs(True)
    for kind in range(2 * KINDS):
        graphs.run(kind, lambda: 7)
        ran = graphs.run("a token", lambda: 8)
    assert ran == (8, "graph") and graphs.run(KINDS, lambda: 7) == (7, "eager")
    assert [graphs.run("a token", lambda: 8) for _ in range(3)] == [(8, "graph")] * 3


def test_without_graphs_the_same_work_is_done_and_said(pair, monkeypatch):
    if not CUDA:
        monkeypatch.setattr("engine.step_graph.StepGraph", Recorded)
        monkeypatch.setattr(driven, "QUESTION_CHUNK", 48)  # chunks of more take minutes
    results = {}
    for setting in ("on", "off"):
        _, made = pair(kv_capacity=768, cuda_graph=setting)
        made._runner.driven.graphs.wanted = made._runner.captures
        result = answer(made)
        by = made.stats()["steps_by"]
        assert ("device-driven, graph" in by) == (setting == "on"), by
        assert made.stats()["cuda_graph"] == setting
        assert any(f"CUDA graphs {setting}" in line for line in ready_lines(made, 1.0))
        results[setting] = result.tokens, selected(result), result.recall.layer_pages_fetched
    assert results["on"] == results["off"]


@pytest.mark.parametrize("first", [262, 896])
def test_turns_of_several_lengths_share_a_graph(pair, monkeypatch, first):
    """Its rows beyond a turn's tokens count for nothing, and the pages of one turn are the next one's past."""
    if not CUDA:
        monkeypatch.setattr("engine.step_graph.StepGraph", Recorded)
    monkeypatch.setattr("engine.step_graph.ROWS", 8)
    monkeypatch.setattr(driven, "QUESTION_CHUNK", 48)  # longer ones are another's
    answers, kinds = {}, []
    run = StepGraphs.run
    monkeypatch.setattr(StepGraphs, "run", lambda self, kind, launch: kinds.append(kind) or run(self, kind, launch))
    for setting in ("on", "off"):
        _, engine = pair(kv_capacity=768, cuda_graph=setting)
        engine._runner.driven.graphs.wanted = engine._runner.captures
        text, answers[setting] = TEXT[:first], []
        for more in ("", "a mill", "and the river", "at last"):
            text += more
            result = engine.complete(engine.prepare(text, SamplingParams(max_tokens=2, ignore_eos=True)))
            answers[setting].append((result.tokens, result.usage.computed, result.recall.layer_pages_fetched))
        by = engine.stats()["steps_by"]
        turns = {kind.rows for kind in kinds if kind.rows > 1}
        assert setting == "off" or (turns and not any(rows % 8 for rows in turns)), turns
        kinds.clear()
    assert answers["on"] == answers["off"], by
    assert any(computed % 8 for _, computed, _ in answers["on"][1:])
