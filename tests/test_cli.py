"""The risk: a command line that is slow to help, silent about a fault, or deaf to one of its own flags."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvring_cli.start
from engine.errors import KVRingError
from engine.switches import SETTINGS
from gates import registry
from gates.verdict import Arm, Check, Outcome, Report
from kvring_cli import console, strip, version
from kvring_cli.app import call
from tests.models import phantom_folder
from tests.test_switches import ANY_VALUE

ROOT = Path(__file__).parent.parent
KVRING = [sys.executable, "-m", "kvring_cli.app"]


class Reached(KVRingError):
    """Raised in place of loading the engine, with what it would have been built with."""


@pytest.fixture
def settings(monkeypatch):
    """settings(*command line): the EngineConfig that this command line builds."""

    def stop(resolved, verbose):
        raise Reached(resolved)

    def stop_gate(name, config, *more):
        raise Reached(type("Resolved", (), {"config": config}))

    monkeypatch.setattr(kvring_cli.start, "start", stop)
    monkeypatch.setattr(registry, "run_gate", stop_gate)
    monkeypatch.setattr(console, "report", lambda error: (_ for _ in ()).throw(error))

    def read(*line: str):
        with pytest.raises(Reached) as reached:
            call(list(line))
        return reached.value.message.config

    return read


def test_help_is_quick_and_loads_no_torch():
    code = "import sys; from kvring_cli.app import call; call(['{}']); sys.exit('torch' in sys.modules)"
    for line in ("--help", "run','--help", "gate','--help", "--version"):
        done = subprocess.run([sys.executable, "-c", code.format(line)], cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "") and done.stdout


def test_the_version_names_what_it_stands_on():
    import torch

    done = subprocess.run([*KVRING, "--version"], cwd=ROOT, capture_output=True, text=True, check=True)
    own, python, built, triton = done.stdout.splitlines()
    assert python == f"python {platform.python_version()}" and triton.startswith("triton")
    assert built == f"torch {importlib.metadata.version('torch')}, CUDA {torch.version.cuda or 'none'}"
    commit = git(ROOT, "rev-parse", "--short=12", "HEAD")
    assert not commit or own.endswith(f"commit {commit}")


def git(folder, *words):
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", "-C", folder, *who, *words], capture_output=True, text=True).stdout.strip()


def test_the_commit_is_gits_own_in_a_clone_a_worktree_packed_or_detached(tmp_path, monkeypatch):
    folder, other = tmp_path / "clone", tmp_path / "worktree"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "a/branch")
    git(folder, "commit", "-q", "--allow-empty", "-m", "one")
    git(folder, "worktree", "add", "-q", "-b", "other", other)
    git(other, "commit", "-q", "--allow-empty", "-m", "two")

    def read(place):
        monkeypatch.setattr(version, "ROOT", place)
        assert version.origin() == f"commit {git(place, 'rev-parse', '--short=12', 'HEAD')}"

    read(folder), read(other)
    git(folder, "pack-refs", "--all")
    read(folder), read(other)
    git(other, "checkout", "-q", "--detach", "a/branch")
    read(other)
    (folder / ".git" / "HEAD").write_text("ref: refs/heads/gone")
    monkeypatch.setattr(version, "ROOT", folder)
    assert version.origin() == "commit unknown"


@pytest.mark.parametrize(
    ("source", "cuda"),
    [
        ("cuda: Optional[str] = '12.8'\nhip = None", "12.8"),
        ("cuda: Optional[str] = None", None),
        ("cuda = '13.0'", "13.0"),
    ],
)
def test_torchs_cuda_is_read_without_importing_it(source, cuda, tmp_path, monkeypatch):
    (tmp_path / "version.py").write_text(source)
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert version.cuda_of_torch() == cuda


@pytest.mark.parametrize("command", [("run", "{}", "why?"), ("chat", "{}"), ("gate", "fits", "-m", "{}")])
def test_every_engine_flag_of_every_command_reaches_the_config(settings, tmp_path, command):
    line, expected = [part.format(tmp_path) for part in command], {}
    for setting in SETTINGS:
        text, expected[setting.field] = ANY_VALUE[setting.field]
        if setting.boolean:
            line.append(setting.flag if text else f"--no-{setting.flag[2:]}")
        else:
            line += [setting.flag, text]
    config = settings(*line)
    assert {field: getattr(config, field) for field in expected} == expected
    assert config.model == str(tmp_path)


def test_a_command_line_without_flags_leaves_every_default(settings, tmp_path):
    config = settings("run", str(tmp_path), "why?")
    assert all(getattr(config, setting.field) == setting.default for setting in SETTINGS)


def test_settings_that_are_not_the_default_are_shown_with_their_source(settings, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NINFER_KV_SINK", "128")
    monkeypatch.setenv("NINFER_KV_SNIK", "128")
    settings("run", str(tmp_path), "why?", "--kv-capacity", "4K")
    said = capsys.readouterr()
    assert "settings | --kv-capacity 4096 | NINFER_KV_SINK=128" in said.err
    assert "did you mean NINFER_KV_SINK?" in said.err and not said.out
    settings("run", str(tmp_path), "why?", "-v")
    said = capsys.readouterr().err
    assert all(setting.flag[2:] in said for setting in SETTINGS)


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        (["run", "/nope", "why?"], 1, "there is no model '/nope'"),
        (["run", "{}", ""], 1, "the question is empty"),
        (["run", "{}", "why \udcff?"], 1, "bytes that are no characters"),
        (["run", "{}", "why?", "--file", "/nope"], 1, "there is no file /nope"),
        (["run", "{}"], 2, "there is no question"),
        (["run", "{}", "why?", "--batch", "x"], 2, "exclude each other"),
        (["run", "{}", "why?", "--glob", "*.py"], 2, "--dir"),
        (["run", "{}", "why?", "--encoding", "gbk"], 2, "--file"),
        (["run", "{}", "why?", "--raw", "-s", "be brief"], 2, "--system"),
        (["run", "{}", "why?", "-o", "x"], 2, "--batch"),
        (["run", "{}", "--batch", "x", "--json"], 2, "--json"),
        (["run", "{}", "-", "--file", "-"], 2, "only once"),
        (["run", "{}", "why?", "--scorer", "magic"], 2, "fused"),
        (["run", "{}", "why?", "--retrieve-share", "101"], 2, "1 to 100"),
        (["run", "{}", "why?", "-t", "-1"], 2, "temperature must be from 0 to 100"),
        (["chat", "{}", "--top-p", "0"], 2, "top_p must be above 0"),
        (["run", "{}", "why?", "--bogus"], 2, "--bogus"),
        (["nope"], 2, "nope"),
        (["gate", "nope"], 2, "no gate 'nope'"),
        (["gate"], 2, "Usage"),
        (["inspect", "{}"], 1, "has no config.json"),
        (["pull", "nope"], 1, "nope"),
    ],
)
def test_a_fault_is_an_error_with_its_fix_and_an_exit_code(line, code, said, tmp_path, capsys):
    assert call([part.format(tmp_path) for part in line]) == code
    written = capsys.readouterr()
    if "Usage" not in said:
        assert written.err.startswith("error: ") and "\nfix: " in written.err and not written.out
    assert said in written.err + written.out


def test_a_switch_out_of_its_range_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NINFER_KV_RETRIEVE", "17")
    assert call(["run", str(tmp_path), "why?"]) == 1
    assert "NINFER_KV_RETRIEVE is '17'" in capsys.readouterr().err


def test_inspect_agrees_with_the_loaded_model(phantom, capsys):
    assert call(["inspect", str(phantom_folder())]) == 0
    assert phantom.digest in capsys.readouterr().out
    from kvring_cli.commands.inspect import describe

    found = describe(phantom_folder())
    assert found["digest"] == phantom.digest and found["architecture"] == phantom.config.family
    assert found["kv_bytes_per_page"] == 64 * phantom.config.kv_bytes_per_token
    assert sum(found["component_bytes"].values()) == sum(found["dtypes"].values()) == found["weight_bytes"]


def test_a_damaged_model_is_refused_by_inspect(tmp_path, capsys):
    for file in phantom_folder().iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert call(["inspect", str(tmp_path)]) == 1
    assert "cut short" in capsys.readouterr().err


def test_the_gate_command_shows_the_table_and_exits_with_the_worst_verdict(monkeypatch, tmp_path, capsys):
    hits = [Outcome(1, 42355, 1, 0.5, "48213", "48213", True)] * 12
    arms = [
        Arm("default", "keyed", "positive", hits, hidden_pages=604, bytes_fetched=3 << 20),
        Arm("recall off", "keyed", "control", hits, twin="default"),
    ]
    reports = {
        "fits": Report("fits", checks=[Check("24 pages", True, "difference 0")]),
        "multi-needle": Report("multi-needle", arms=arms),
    }
    monkeypatch.setattr(registry, "run_gate", lambda name, *more: reports[name].judge())
    file = tmp_path / "report.json"
    assert call(["gate", "fits", "multi-needle", "-m", str(tmp_path), "--json", str(file)]) == 3
    said = capsys.readouterr().out
    assert "12/12" in said and "604" in said and "3.0" in said and "ok  24 pages: difference 0" in said
    assert "74-100" in said and "multi-needle: BLIND" in said.splitlines()[-1] and "fits: PASS" in said
    assert '"verdict": "BLIND"' in file.read_text()
    assert call(["gate", "fits", "-m", str(tmp_path), "--json", "/nope/x"]) == 1
    assert call(["gate", "--list"]) == 0 and "turns red" in capsys.readouterr().out


def test_the_strip_marks_the_pages_that_were_selected_most_and_says_of_the_others_where_they_were():
    from engine.result import PageView

    def page(resident=False, seen=False, fetched=False, **steps):
        return PageView(resident, seen, fetched, steps)

    pages = [page(True, True), page(False, True, True, key=9, neighbor=2), page(False, True, False, lexical=8)]
    pages += [page(), page(True), page(False, True, True, key=1), page(False, True), page(True, True, neighbor=12)]
    chosen = strip.often(pages, SimpleNamespace(pages_selected=17, selections=6))
    assert chosen == {1, 2, 7}
    assert "".join(strip.symbol(page, index in chosen) for index, page in enumerate(pages)) == "#Kl.o+~n"
    drawn = strip.draw(pages * 8, chosen, width=40).plain.splitlines()
    assert max(map(len, drawn)) <= 60 and drawn[1].startswith("30: ")
    assert "K often selected by key, fetched: 1" in drawn and ". never seen: 8" in drawn
    assert strip.groups(pages, chosen) == [(7, 7), (1, 2)]
    lines = strip.describe(pages, chosen, list(range(512)), lambda ids: f"tokens from {ids[0]}")
    assert lines[0].startswith("page 7 | neighbor 12 | fetched 0 of 1")
    assert lines[1] == "pages 1-2 | key 9, lexical 8, neighbor 2 | fetched 1 of 2 | tokens from 64"
    assert lines[2] == "pages selected less often: 1"
    assert strip.often(pages[3:5], SimpleNamespace(pages_selected=0, selections=0)) == set()


@pytest.mark.skipif(os.name == "nt", reason="signals are sent otherwise there")
def test_ctrl_c_while_the_command_is_imported_prints_no_trace():
    code = "import builtins, os, signal, sys\nreal = builtins.__import__\n"
    code += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background is born without
    code += "def stopping(name, *rest):\n    if name == 'typer':\n        os.kill(os.getpid(), signal.SIGINT)\n"
    code += "    return real(name, *rest)\nbuiltins.__import__ = stopping\n"
    code += "from kvring_cli.__main__ import main\nmain()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps a folder that somebody stands in")
def test_a_working_folder_that_is_gone_is_refused_before_torch_ends_the_process(tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert call(["doctor"]) == 1
    assert capsys.readouterr().err == "error: the folder that this was started in is gone\nfix: cd to one that exists\n"
