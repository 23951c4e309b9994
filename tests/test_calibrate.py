"""The risk: a calibration that stores what is wrong or slower, is lost half-way, or takes the server along."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine import device_profile
from engine.config import PAGE, EngineConfig
from engine.device import hardware
from engine.device_profile import DeviceProfile, look_up, save
from engine.engine import Engine
from engine.errors import EngineError
from engine.model.random import random_config
from engine.platform import this_platform
from engine.routes import CANDIDATES, COMPILED_IN, Routes
from kvring_cli.app import call
from kvring_cli.calibration.choose import bands, fastest

CPU = torch.device("cpu")

# --- choosing ---------------------------------------


def test_a_candidate_wins_only_if_it_is_faster_and_right():
    import time

    def way(seconds: float, value: float = 1.0):
        def run() -> torch.Tensor:
            until = time.process_time() + seconds
            while time.process_time() < until:
                pass
            return torch.tensor(value)

        return run

    assert fastest({"old": way(0.004), "new": way(0.001)}, "old", CPU) == "new"
    assert fastest({"old": way(0.004), "wrong": way(0.001, 2.0)}, "old", CPU) == "old"
    assert fastest({"old": way(0.002), "same": way(0.002)}, "old", CPU) in ("old", "same")
    assert bands((1, 4, 16), ("a", "a", "b")) == ((4, "a"), (16, "b"))


def test_calibrate_stores_a_row_that_the_next_start_finds(tmp_path, monkeypatch, capsys):
    import json

    import kvring_cli.calibration.choose as choose

    monkeypatch.setattr(choose, "ROUNDS", 2)
    monkeypatch.setenv("NINFER_DEVICE_PROFILES", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert call(["calibrate", "--device", "cpu", "--routes-only", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    name, count = hardware(CPU, this_platform())
    found = look_up(name, count, tmp_path / device_profile.FILE)
    assert found.source == "user" and (found.profile.hardware_class, found.profile.origin) == (name, row["origin"])
    assert row["stored"] == str(tmp_path / device_profile.FILE)


# --- cards ------------------------------------------


@pytest.mark.parametrize("key", ["gather_units", "page_scores", "decode_attention/d64/g2"])
def test_a_cards_candidates_do_the_same_work_and_what_is_found_is_taken(monkeypatch, key):
    """Under Triton's interpreter: every way is launched, and held against the compiled-in one."""
    pytest.importorskip("triton", reason="triton has no wheel here")
    from kvring_cli.calibration import cuda, graph

    monkeypatch.setattr(graph, "LAUNCHES", 1)
    subject = {"gather_units": cuda.Gathering, "page_scores": cuda.Scoring}.get(key, cuda.Attending)
    family = key.split("/")[0]
    seen = []

    def second(ways, compiled_in, device, agree):
        assert tuple(ways) == CANDIDATES[family] and compiled_in == COMPILED_IN[family][0][1]
        reference = ways[compiled_in]().clone()
        assert reference.float().abs().sum() > 0
        for name, way in ways.items():
            got = way().clone()
            assert agree(got, reference), name
            assert not agree(got + 1, reference), "a wrong one can't win"
            seen.append(name)
        return CANDIDATES[family][1]

    monkeypatch.setattr(cuda, "fastest", second)
    monkeypatch.setattr("gates.kernels.MIB", 1)  # two layers are enough
    find = cuda.finder(key, subject, random_config("random:tiny"))
    found = find(CPU, this_platform(), pools=(3, 5))
    assert found == ((5, CANDIDATES[family][1]),) and len(seen) == 2 * len(CANDIDATES[family])
    assert Routes({key: found}).routed == 1


def test_a_route_changes_what_a_card_launches(phantom):
    pytest.importorskip("triton", reason="triton has no wheel here")
    from engine.triton_runner import TritonRunner
    from tests.interpreted import Interpreted

    config = EngineConfig(model="", max_context=4096, kv_capacity=2048)
    engine = Engine(config, phantom, backends=[Interpreted])
    pool, runner = engine._runner.pool, engine._runner
    plain = runner.driven.launches
    pool.routes = Routes({"decode_attention/d64/g2": ((1, 8),), "gather_units": ((1, 32),), "page_scores": ((1, 32),)})
    routed = TritonRunner(runner).driven.launches
    engine.close()
    assert (plain._attention.units, routed._attention.units) == (4, 8)
    assert (plain._gather_units, routed._gather_units) == (16, 32)
    assert (plain._scores.units, routed._scores.units) == (16, 32)
    assert {("decode_attention/d64/g2", 8), ("gather_units", 32), ("page_scores", 32)} <= set(pool.routes.ran)


def test_two_depths_tell_a_steps_own_cost_from_its_layers(monkeypatch):
    from kvring_cli.calibration import rates, samples
    from kvring_cli.calibration.standin import Size, stand_in, work_of
    from kvring_cli.predict import new_pages, predict

    lengths = samples.Lengths(dense=512, short=1280, long=2048, pool=1024, chunk=128)

    def sample(model, lengths, page=0.0):
        """7 ms a step and 90 a turn, whatever the layers; 2 ms of a layer's step, 5 of its turn, 3 of its chunk. A turn
        finds half of its pages in the selection before.
        """
        layers = model.config.layers
        token, turn = (
            {n: own + layers * each for n in lengths.contexts} for own, each in ((0.007, 0.002), (0.09, 0.005))
        )
        fetched = {n: layers * new_pages(512, 1024, n) / PAGE / 2 for n in lengths.contexts}
        return samples.Sample(layers, token, turn, 0.003 * layers, 1e-9 * layers, 96, fetched, 512, 0.0)

    monkeypatch.setattr(rates, "sample", sample)
    model = stand_in(Size(64, 64, 2, 1, 64, 8), CPU, torch.float32)
    work = replace(work_of(model), layers=30)
    found = rates.in_bands(list(rates.card_points(model, work, lengths, page=0.001)))
    found["head/float32"] = ((1, 1e15),)
    for context, fetched in ((1280, 512 * 256 / 768), (4096, 512 * 3072 / 3584), (32768, 512 * 31744 / 32256)):
        told = predict(work, found, context=context, pool=1024, window=768, selection=512, chunk=128)
        assert told.prefill_seconds == pytest.approx(context / 128 * 30 * 0.003, rel=0.02)
        assert 1 / told.decode_rate == pytest.approx(0.007 + 30 * 0.002, rel=0.02)
        turn = 0.09 + 30 * (0.005 + 0.001 * fetched / PAGE / 2)
        assert told.second_turn_seconds == pytest.approx(turn, rel=0.02), "it fetches a selection, and no more"


def test_second_turns_compute_a_question_and_a_half_page_and_go_on_from_each_other_over_the_pool(monkeypatch):
    """Within the pool they are of one length: on a card each new one would be planned anew."""
    from kvring_cli.calibration import samples
    from kvring_cli.calibration.standin import Size, stand_in

    timed, seen = samples.timed, []

    def kept(engine, text, answer, recall=None):
        seen.append((len(text.split()), run := timed(engine, text, answer, recall)))
        return run

    monkeypatch.setattr(samples, "timed", kept)
    lengths = samples.Lengths(dense=512, short=1280, long=1280, pool=1024, chunk=128)
    engine = samples.opened(stand_in(Size(64, 64, 2, 1, 64, 2), CPU, torch.float32), lengths, lengths.pool)
    try:
        for tokens, step in ((128, 0), (1280, 64)):
            seen.clear()
            samples._run(engine, tokens, 2)
            samples._turn(engine, tokens)
            (_, fresh), (_, again), *turns = seen
            assert fresh.computed == tokens and again.computed <= PAGE
            assert [(words, run.computed) for words, run in turns] == [(tokens + 96 + step * n, 96) for n in range(7)]
        assert sum(run.fetched for _, run in turns) > 0
        engine.audit()
    finally:
        engine.close()


def test_a_processor_is_measured_in_rounds_so_that_a_slow_second_spoils_none_of_its_figures(monkeypatch):
    """Shared cores are half as fast for seconds at a time: one whole round is slow, and nothing of it is left."""
    from kvring_cli.calibration import rounds, samples
    from kvring_cli.calibration.standin import Size, stand_in

    timed, asked = rounds.timed, []

    def slow_in_the_second_round(engine, text, answer, recall=None):
        run, whole = timed(engine, text, answer, recall), engine.capacity.pool_pages * PAGE > 1024
        asked.append((len(text.split()), whole, run.computed))
        fresh = [words for words, _, computed in asked if computed == words == lengths.dense]
        pace = 2.0 if len(fresh) in (3, 4) else 1.0
        chunks = tuple((middle, pace * (0.1 + 1e-4 * middle)) for middle, _ in run.chunks)
        return replace(run, chunks=chunks, steps=(pace * len(text.split()) * 1e-3,) * (answer - 1), first=pace)

    sizes = [Size(64, 64, 2, 1, 64, 2), Size(64, 64, 2, 2, 64, 1)]

    monkeypatch.setattr(rounds, "timed", slow_in_the_second_round)
    monkeypatch.setattr(rounds, "head_seconds", lambda head: 0.0)
    lengths = samples.Lengths(dense=1152, short=1280, long=2048, pool=1024, chunk=128, answer=3)
    models = [stand_in(size, CPU, torch.float32) for size in sizes]
    for size, found in zip(sizes, rounds.samples_in_rounds(models, lengths), strict=True):
        assert (found.layers, found.chunk, found.slope) == (size.layers, pytest.approx(0.1), pytest.approx(1e-4))
        assert found.token == {tokens: pytest.approx((tokens + 96) * 1e-3) for tokens in lengths.contexts}
        assert set(found.first.values()) == {1.0} and found.computed == 96
    turns = [(words - 96, whole) for words, whole, computed in asked if computed == 96]
    one = [(samples.FEW, True), (lengths.dense, True), (lengths.short, False), (lengths.long, False)]
    assert turns == [turn for turn in one for _ in range(2)] * len(sizes) * rounds.ROUNDS, "each by its own engine"


def test_a_burst_of_others_work_spoils_one_of_a_cards_two_answers(monkeypatch):
    """One lasted 0.1 s on a shared H200, and attention seemed three times slower."""
    from kvring_cli.calibration import samples
    from kvring_cli.calibration.standin import Size, stand_in

    asked = []

    def timed(engine, text, answer, recall=None):
        asked.append(answer)
        token = 0.009 if asked.count(48) % 3 == 2 else 0.002  # an answer at the end of `_run`; a later one is quiet
        return samples.Run(((256.0, 1.0), (768.0, 2.0)), (token,), 1.0, 96, 0)

    monkeypatch.setattr(samples, "timed", timed)
    lengths = samples.Lengths(dense=512, short=1280, long=2048, pool=1024, chunk=128, answer=48)
    found = samples.sample(stand_in(Size(64, 64, 2, 1, 64, 2), CPU, torch.float32), lengths)
    assert asked[2:12] == [48, 48, *[1] * 7, 48] and asked.count(48) == 3 * len(lengths.contexts)
    assert len({*found.token.values()}) == 1 and max(found.token.values()) <= 0.002


def test_a_part_that_fails_is_named_and_the_rest_is_kept(monkeypatch):
    from kvring_cli import calibration
    from kvring_cli.calibration import rates, routes

    def fails() -> None:
        raise RuntimeError("CUDA error:\nout of memory")

    monkeypatch.setattr(routes, "cases", lambda *_: [("a", fails), ("b", lambda: {"page_gather": ((1, "take"),)})])
    monkeypatch.setattr(rates, "cases", lambda *_, **__: [("c", fails), ("d", lambda: [("head/float32", 2, 4.0)])])
    kept, said = [], []
    row = calibration.calibrate(CPU, this_platform(), lambda *_: None, keep=kept.append, warn=said.append)
    assert row.routes == {"page_gather": ((1, "take"),)} and row.rates == {"head/float32": ((2, 4.0),)}
    assert [(one.routes, one.rates) for one in kept] == [(row.routes, {}), (row.routes, row.rates)]
    assert said == [f"{part} not measured: RuntimeError: CUDA error: out of memory" for part in "ac"]
    assert row.origin.endswith("; not measured: a, c")
    monkeypatch.setattr(routes, "cases", lambda *_: [("a", fails)])
    with pytest.raises(EngineError, match="nothing could be measured"):
        calibration.calibrate(CPU, this_platform(), lambda *_: None, rates=False, keep=kept.append)
    assert len(kept) == 2, "a row of nothing would be found by every later start"


def test_no_part_is_begun_when_time_is_over():
    from kvring_cli.calibration.parts import Parts

    said = []
    parts = Parts(lambda *_: None, said.append)
    assert list(parts.measured([("a", lambda: 1), ("b", lambda: 2)], within=-1)) == []
    assert parts.missing == ["a", "b"] and not parts.done and "were over" in said[0]


def test_an_unknown_card_is_measured_once_in_a_process_of_its_own_and_a_failure_is_said(tmp_path, monkeypatch, capsys):
    from kvring_cli import start

    path, ran = tmp_path / "mine", []

    def run(command, **_):
        """What the child stores; none where the card is lost, and none in time where it hangs."""
        ran.append(command)
        code = len(ran) - 1
        if code == 2:
            raise subprocess.TimeoutExpired(command, 1)
        if not code:
            row = DeviceProfile("some-card-sm86", 28, "a test", {"gather_units": ((64, 8),)})
            save(row, Path(command[command.index("--device-profile-path") + 1]))
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr("engine.device.resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr("engine.device.hardware", lambda device, platform: ("some-card-sm86", 28))
    monkeypatch.setattr(start.subprocess, "run", run)
    for _ in range(2):
        start.settle("phantom", {"device_profile_path": str(path)}, verbose=False)
    assert len(ran) == 1 and look_up("some-card-sm86", 28, path / device_profile.FILE).source == "user"
    assert call([*ran[0][3:], "--dry-run", "--help"]) == 0, "a line that the command takes"
    start.settle("phantom", {"device_profile": "off"}, verbose=False)
    (tmp_path / "file").write_text("no folder")
    for folder, reason in (("file/below", "can't be written"), ("b", "ended with code 1"), ("c", "did not end within")):
        capsys.readouterr()
        start.settle("phantom", {"device_profile_path": str(tmp_path / folder)}, verbose=False)
        said = capsys.readouterr().err
        assert reason in said and "were not measured, the compiled-in ones serve" in said
    assert len(ran) == 3


def test_a_part_that_loses_the_card_ends_the_rest_and_keeps_what_was_there(monkeypatch):
    from kvring_cli import calibration
    from kvring_cli.calibration import parts, rates, routes

    def fails() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    def lost() -> bool:
        return True

    monkeypatch.setattr(parts, "_lost", lost)
    monkeypatch.setattr(routes, "cases", lambda *_: [("a", lambda: {"page_gather": ((1, "take"),)}), ("b", fails)])
    monkeypatch.setattr(rates, "cases", lambda *_, **__: [("c", lambda: pytest.fail("it was begun"))])
    kept, said = [], []
    with pytest.raises(EngineError, match="b broke the card's context"):
        calibration.calibrate(CPU, this_platform(), lambda *_: None, keep=kept.append, warn=said.append)
    assert kept[-1].routes == {"page_gather": ((1, "take"),)} and kept[-1].origin.endswith("not measured: b, c")
    assert len(said) == 1
