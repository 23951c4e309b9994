"""The risk: a launcher that serves although something is wrong, or with other settings than it says."""

from __future__ import annotations

import shlex
import socket
import stat
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

import engine.platform
import kvring_cli.commands.doctor
import kvring_cli.commands.serve
from engine.platform import Driver, TorchBuild
from engine.trials import Trials
from gates import smoke
from kvring_cli import planning, shapes
from kvring_cli.app import call
from kvring_cli.commands.launch import serve_line
from kvring_cli.engines import Choice
from tests import test_without_posix as without_posix
from tests.machines import laptop, windows_pc
from tests.models import phantom_folder

SIZES = ["--max-context", "4096", "--kv-capacity", "2560"]
SMALL = "--device cuda --profile 8gb"
CARD = Choice("chosen", "triton-sm86", "a card", "8.6", "", settings=(("--device", "cuda"), ("--kv-window", "4096")))


@pytest.fixture
def machine(monkeypatch):
    """machine(facts): what launch sees; `.tried` are the options of the smoke, `.served` the configs that serve got."""
    seen = SimpleNamespace(tried=[], served=[], verdict="PASS")

    def run(model, *, options, timeout):
        seen.tried.append((model, list(options)))
        report = smoke.SmokeReport("smoke", verdict=seen.verdict)
        report.checks.append(smoke.Check("ready in time", seen.verdict == "PASS", "it ended with exit code 1"))
        report.reasons.append("server | error: what the server said")
        return report

    def set_facts(facts):
        monkeypatch.setattr(engine.platform, "gather", lambda: facts)
        return seen

    monkeypatch.setattr(smoke, "run", run)
    monkeypatch.setattr(kvring_cli.commands.doctor, "try_card", lambda facts: pytest.fail("there is no card to try"))
    monkeypatch.setattr(kvring_cli.commands.serve, "_serve", lambda resolved, *_: seen.served.append(resolved.config))
    return set_facts


def test_it_looks_chooses_plans_tries_and_serves_with_what_it_said(machine, capsys, monkeypatch):
    monkeypatch.setenv("NINFER_KV_SINK", "128")
    seen = machine(laptop())
    assert call(["launch", "phantom", "--port", "0", "--no-reuse", *SIZES, "--", "--max-active", "2"]) == 0
    lines = capsys.readouterr().err.splitlines()
    steps = [line.split("|")[0].strip() for line in lines if line.split("|")[0].strip() in STEPS]
    assert steps == STEPS
    said = shlex.split(next(line for line in lines if line.startswith("serve ")).partition("| kvring ")[2])
    assert said[:4] == ["serve", "phantom", "--device", "cpu"] and said[-4:] == ["--port", "0", "--max-active", "2"]
    (model, options), (config,) = seen.tried[0], seen.served
    assert model == "phantom" and [word for word in said if word in options] and "--port" not in options
    assert (config.device, config.max_context, config.kv_capacity) == ("cpu", 4096, 2560)
    assert (config.sink, config.reuse) == (128, False)
    monkeypatch.delenv("NINFER_KV_SINK")
    assert call(said) == 0 and seen.served[1] == config  # the line alone means the same


STEPS = ["doctor", "engine", "plan", "smoke", "serve"]


def test_doctors_first_failure_ends_it_with_its_fix(machine, capsys):
    seen = machine(laptop(torch=TorchBuild(None, trouble="torch is not installed")))
    assert call(["launch", *SIZES]) == 1
    said = capsys.readouterr().err
    assert "error: doctor: torch" in said and "fix: pip install" in said
    assert not seen.tried and not seen.served


def test_a_port_that_is_taken_ends_it_before_anything_is_loaded(machine, capsys):
    seen = machine(laptop())
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        assert call(["launch", "--port", str(holder.getsockname()[1]), *SIZES]) == 1
    assert "doctor: port" in capsys.readouterr().err and not seen.tried


def test_a_model_that_does_not_fit_ends_it_with_what_would(machine, capsys):
    tight = laptop()
    seen = machine(replace(tight, memory=replace(tight.memory, free=tight.memory.total // 16)))
    assert call(["launch", "--port", "0", "--max-context", "256K", "--ring", "on"]) == 1
    said = capsys.readouterr().err
    assert "error: " in said and "fix: " in said and not seen.tried and not seen.served


@pytest.mark.parametrize("verdict", ["FAIL", "REFUSED"])
def test_a_smoke_that_fails_ends_it_and_shows_what_the_server_said(machine, capsys, verdict):
    seen = machine(laptop())
    seen.verdict = verdict
    assert call(["launch", "--port", "0", *SIZES]) == 1
    said = capsys.readouterr().err
    assert "what the server said" in said and "error: smoke: ready in time" in said and not seen.served
    assert call(["launch", "--port", "0", "--no-smoke", *SIZES]) == 0 and len(seen.served) == 1


def test_a_card_that_torch_cannot_use_ends_it(machine, capsys):
    seen = machine(windows_pc(torch=TorchBuild("2.8.0+cpu")))
    assert call(["launch", *SIZES]) == 1
    assert "download.pytorch.org" in capsys.readouterr().err and not seen.served


@pytest.mark.parametrize(
    "facts",
    [windows_pc(torch=TorchBuild("2.8.0+cpu")), laptop(driver=Driver(trouble="Driver/library version mismatch"))],
    ids=["torch without CUDA", "a driver that doesn't answer"],
)
def test_who_asks_for_the_cpu_is_not_stopped_by_a_card(machine, facts, capsys):
    seen = machine(facts)
    assert call(["launch", "--device", "cpu", "--port", "0", "--no-smoke", *SIZES]) == 0 and len(seen.served) == 1
    assert call(["plan", "phantom", "--device", "cpu"]) == 0 and "torch-cpu" in capsys.readouterr().out
    if not facts.gpus:
        assert call(["plan", "phantom"]) == 1 and "could not be asked" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "environ", "profile", "expected"),
    [
        ({}, {}, None, "--device cuda --kv-window 4096"),
        ({"kv_window": "8K"}, {}, None, "--device cuda --kv-window 8K"),
        ({}, {"NINFER_KV_WINDOW": "8192"}, None, "--device cuda --kv-window 8192"),
        ({"kv_capacity": "2560"}, {}, None, "--device cuda --kv-capacity 2560"),
        ({"device": "cpu"}, {}, None, "--kv-window 4096 --device cpu"),
        ({"reuse": False, "verify_pages": True}, {}, "8gb", f"{SMALL} --no-reuse --verify-pages"),
        (
            {},
            {"NINFER_KV_RETRIEVE": "0", "NINFER_KV_RING": "1"},
            "8gb",
            "--device cuda --profile 8gb --ring on --retrieve off",
        ),
        (
            {"host_kv_bytes": "2", "device_limit_bytes": "11GiB"},
            {},
            "8gb",
            "--device cuda --profile 8gb --host-kv-gib 2 --vram-limit 11GiB",
        ),
    ],
)
def test_a_flag_beats_a_switch_and_both_beat_the_choice(flags, environ, profile, expected):
    assert serve_line(CARD, "m", profile, flags, environ) == ["serve", "m", *expected.split()]


def test_it_writes_a_script_of_the_resolved_settings_and_does_not_serve(machine, tmp_path, monkeypatch, capsys):
    seen = machine(laptop())
    monkeypatch.setenv("NINFER_KV_SINK", "128")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my model").symlink_to(phantom_folder())
    file = tmp_path / "start.sh"
    assert call(["launch", "my model", "--port", "0", "--write", "start.sh", *SIZES]) == 0
    line = next(line for line in file.read_text().splitlines() if line.endswith('"$@"'))
    words = shlex.split(line)
    assert words[:5] == [sys.executable, "-m", "kvring_cli.app", "serve", str(tmp_path / "my model")]
    assert words[words.index("--sink") + 1] == "128" and file.stat().st_mode & stat.S_IXUSR
    assert len(seen.tried) == 1 and not seen.served
    assert call(["launch", "--port", "0", "--no-smoke", "--write", "start.bat", *SIZES]) == 0
    assert "another system" in capsys.readouterr().err
    assert call(["launch", "--write", "no/start.sh"]) == 1 == call(["launch", "--write", "start.txt"])
    assert len(seen.tried) == 1


def test_launch_and_receipt_need_nothing_that_windows_lacks(tmp_path):
    for line in (
        ["launch", "--port", "0", "--no-smoke", "--write", str(tmp_path / "start.bat"), *SIZES],
        ["receipt", "-o", str(tmp_path / "receipt.txt")],
    ):
        done = without_posix.run(f"assert call({line!r}) == 0")
        assert done.returncode == 0, done.stderr
    assert {file.name for file in tmp_path.iterdir()} == {"start.bat", "receipt.txt"}


def test_options_for_serve_count_in_the_plan(machine, capsys):
    seen = machine(laptop())
    assert call(["launch", "phantom", "--port", "0", "--no-smoke", "--", *SIZES]) == 0
    assert "plan   | context 4,096 tokens" in (said := capsys.readouterr().err) and "pool 2,560 tokens" in said
    assert seen.served[0].kv_capacity == 2560
    assert call(["launch", "--port", "0", "--no-smoke", "--", *SIZES]) == 0  # MODEL left out
    assert seen.served[1] == seen.served[0]


def test_an_option_that_serve_does_not_know_ends_it_before_anything_is_tried_or_written(machine, tmp_path, capsys):
    seen, file = machine(laptop()), tmp_path / "start.sh"
    for words in (["--bogus", "3"], ["--max-active", "many"], ["another-model"]):
        assert call(["launch", "phantom", "--no-smoke", "--write", str(file), "--", *words]) == 2
        said = capsys.readouterr().err
        assert "doctor" not in said and "fix: kvring serve --help" in said
    assert call(["launch", "phantom", "--no-smoke", "--write", str(file), "--", "--port", "9000"]) == 2
    assert "fix: kvring launch MODEL --port 9000" in capsys.readouterr().err  # doctor would look at another port
    assert not file.exists() and not seen.served


def test_a_profile_that_there_is_not_ends_it_before_the_machine_is_looked_at(machine, monkeypatch, capsys):
    monkeypatch.setattr(engine.platform, "gather", lambda: pytest.fail("it was looked at"))
    assert call(["launch", "phantom", "--profile", "13gb"]) == 1
    assert "there is no card profile '13gb'" in capsys.readouterr().err


def test_a_card_that_is_only_pretended_is_not_launched_on(machine, monkeypatch, capsys):
    seen = machine(laptop())
    monkeypatch.setenv("NINFER_AGENT_CC", "8.9")
    assert call(["launch", "phantom", "--port", "0", "--no-smoke", *SIZES]) == 0
    said = capsys.readouterr().err
    assert "NINFER_AGENT_CC is not read" in said and "torch-cpu" in said and seen.served[0].device == "cpu"
    monkeypatch.setenv("NINFER_AGENT_CC", "nine")
    assert call(["launch", "phantom", "--port", "0", "--no-smoke", *SIZES]) == 1
    assert "'nine', which is not like 8.9" in capsys.readouterr().err


def test_each_fact_is_looked_up_once_also_where_weights_are_quantised_to_fit(machine, monkeypatch, capsys, tmp_path):
    """The card's own trial, a model's tables and each plan cost seconds on a slow disk."""
    facts = windows_pc()
    seen, calls = machine(facts), []

    def count(where, name, key):
        real = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *a, **more: (calls.append((name, key(*a))), real(*a, **more))[1])

    count(shapes, "shape_of", lambda model: model)
    count(planning, "make_plan", lambda shape, place, config: config.weights)
    count(engine.platform, "gather", lambda: None)
    tried = Trials(6 << 30, 24e9, 25e9, False)
    monkeypatch.setattr(
        kvring_cli.commands.doctor, "try_card", lambda facts: (calls.append(("try_card", None)), tried)[1]
    )
    start = tmp_path / "start.sh"
    assert call(["launch", "random:qwen3-8b", "--port", "0", "--write", str(start)]) == 0 and len(seen.tried) == 1
    assert "weights| q" in capsys.readouterr().err and "--weights" in start.read_text()
    assert len(calls) == len(set(calls)) > 4, calls
    calls.clear()
    assert call(["plan", "phantom"]) == 0 and len(calls) == len(set(calls)), calls
