"""The risk: a bench that takes the machine down, sweeps a setting to no effect, or fails to draw what took minutes."""

from __future__ import annotations

import gc
import importlib.util
import json
import weakref
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import engine.engine
from engine.config import EngineConfig
from gates import climb as climbing
from gates.climb import Rung, Stopped, climb, expected, too_much
from kvring_cli.app import call
from kvring_cli.sweep import cases
from tests.models import phantom_folder

LAST = Rung(8192, 8000, 1.0, 50.0, 10_000, 5_000, 0.0, "torch-cpu", 2.0, 0.5)


@given(st.integers(8193, 1 << 20), st.integers(1, 1 << 22), st.none() | st.integers(1, 1 << 22))
def test_the_climb_ends_before_what_is_expected_exceeds_what_is_there(context, ram, device):
    need_ram, need_device = expected(LAST, context)
    assert need_ram == 10_000 + 2 * (context - 8192) and abs(need_device - 5_000 - (context - 8192) / 2) <= 1
    fits = need_ram <= ram and (device is None or need_device <= device)
    assert (too_much(LAST, context, ram, device) == "") == fits
    assert "RAM" in too_much(LAST, context, need_ram - 1, None)
    assert "device memory" in too_much(LAST, context, need_ram, need_device - 1)
    assert not too_much(replace(LAST, device=None), context, need_ram, 1)


def test_a_climb_measures_each_context_and_says_why_it_ends(monkeypatch):
    config = EngineConfig(model=str(phantom_folder()), kv_capacity=2048, sink=64, device_profile="off")
    first, second, end = climb(config, [2048, 4096, 1 << 20], 2, "auto", lambda line: None)
    assert (first.context, second.context, first.fetched) == (2048, 4096, 0.0) and second.fetched > 0
    assert 1900 < first.prompt < 2048 and 3900 < second.prompt < 4096
    assert second.ram > 0 and second.device is None and second.ram_per_token >= 1024
    assert end.context == 1 << 20 and "trained" in end.reason

    monkeypatch.setattr(climbing, "_room", lambda config, platform: (1 << 20, None))
    _, end = climb(config, [1024, 2048], 2, "window", lambda line: None)
    assert isinstance(end, Stopped) and end.context == 2048 and "1 MiB may be used" in end.reason


def test_a_sweep_runs_every_value_and_shows_it(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    rows, image = tmp_path / "rows.json", tmp_path / "curve.png"
    command = "bench rates --contexts 1024 --tokens 2 --parts recall --sweep kv-capacity=1600,2K --device-profile off"
    assert call([*command.split(), "--json", str(rows), "--plot", str(image)]) == 0
    shown = capsys.readouterr().out
    assert "| kv-capacity 1600 | decode, recall |" in shown and "| kv-capacity 2048 | decode, recall |" in shown
    assert [row["setting"] for row in json.loads(rows.read_text())["rows"]] == ["kv-capacity 1600", "kv-capacity 2048"]
    assert image.read_bytes().startswith(b"\x89PNG") and image.stat().st_size > 5000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("rates --sweep nothing=1", "name=a,b,c"),
        ("rates --sweep kv-capacity", "name=a,b,c"),
        ("rates --sweep kv-capacity=", "names no value"),
        ("rates --sweep scorer=fused,magic", "one of fused"),
        ("rates --sweep kv-capacity=4032 --kv-capacity 4032", "given too"),
        ("rates --sweep max-context=4096", "decided by this command"),
        ("rates --max-context 4096", "decided by this command"),
        ("context --max-context 4096", "decided by this command"),
        ("context --contexts 8X", "256 tokens or more"),
        ("context --plot curve.jpg", "PNG"),
        ("context --fill magic", "one of auto"),
        ("rates --fill magic", "one of exact"),
        ("rates --parts ,", "one of prefill"),
        ("kernels --parts ,", "one of"),
    ],
)
def test_what_would_do_nothing_is_refused_before_anything_is_loaded(words, said, capsys):
    assert call(["bench", *words.split()]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_without_matplotlib_a_plot_is_refused_before_the_measurement(monkeypatch, capsys, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    assert call(["bench", "context", "--plot", str(tmp_path / "curve.png")]) == 1
    said = capsys.readouterr().err
    assert "matplotlib, which is not installed" in said and "fix: pip install matplotlib" in said


def test_a_swept_boolean_keeps_its_value():
    on, off = cases("reuse=on,off", {}, {})
    assert (on.flags["reuse"], off.flags["reuse"], off.label) == (True, False, "reuse off")


def test_a_model_is_let_go_before_the_next_form_of_it_is_loaded(monkeypatch):
    """On a card both may not fit together; and the first's bytes counted as what the second needs beside weights."""
    load, before, models = engine.engine.load_model, [], []

    def loading(*arguments):
        before.append(sum(model() is not None for model in models))
        loaded = load(*arguments)
        models.append(weakref.ref(loaded.transformer))
        loaded.transformer.itself = loaded.transformer  # as engines on a card are part of cycles
        return loaded

    monkeypatch.setattr(engine.engine, "load_model", loading)
    line = ["-m", "random:tiny", "--contexts", "300", "--parts", "recall", "--tokens", "2", "--prefill-chunk", "128"]
    gc.disable()
    try:
        assert call(["bench", "rates", *line, "--kv-capacity", "1024", "--sweep", "weights=dense,q8_0"]) == 0
    finally:
        gc.enable()
    assert before == [0, 0]
