"""The risk: a receipt that is posted in public tells who wrote it, where, and about what; or doesn't tell enough."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConfigError, RequestError
from engine.platform import gather
from engine.switches import SETTINGS, Effective, resolve
from gates.child import free_port
from kvring_cli.app import call
from kvring_cli.commands.receipt import make
from kvring_cli.commands.run import run
from kvring_cli.commands.serve import serve
from kvring_cli.receipt import record as record_module
from kvring_cli.receipt.record import KEPT_REQUESTS, KEPT_STARTS, Record, last
from kvring_cli.receipt.redact import HIDDEN, flags_of, redact_argv, scrub
from tests.models import phantom_folder

PERSON = "Zoë O'Brien 中文"
QUESTION = "Where did Malwina bury the strongbox?"
SIZES = ["--max-context", "8192", "--kv-capacity", "2560", "--prefill-chunk", "256"]
KVRING = [sys.executable, "-m", "kvring_cli.app"]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home whose path and owner are anything but plain; starts are recorded below it."""
    home = tmp_path / "Users" / PERSON
    home.mkdir(parents=True)
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(home))
    for name in ("USER", "USERNAME", "LOGNAME"):
        monkeypatch.setenv(name, PERSON)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / ".cache"))
    monkeypatch.setattr(record_module, "folder", lambda: home / ".cache" / "kvring" / "starts")
    monkeypatch.setenv("KVRING_RECORD", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
    return home


@pytest.fixture
def resolved():
    return resolve("phantom", {"kv_capacity": "2560"}, {"NINFER_KV_SINK": "128"})


def test_after_a_killed_server_it_tells_all_but_who_where_and_what(home):
    model = Path(shutil.copytree(phantom_folder(), home / "private model of Zoë"))
    port, secret = free_port(), "sk-42424242"
    line = ["serve", str(model), "--port", str(port), "--api-key", secret, "--request-log", str(home / "log"), *SIZES]
    with subprocess.Popen([*KVRING, *line], stderr=subprocess.DEVNULL, cwd=home) as process:
        try:
            messages = [{"role": "user", "content": QUESTION}]
            ask(port, secret, {"model": model.name, "messages": messages, "max_tokens": 3})
            while not last()["requests"]:
                time.sleep(0.05)
            running = receipt(home)
        finally:
            process.kill()
    killed = receipt(home)
    private = (PERSON, "Zoë", "O'Brien", "中文", str(home), home.name, "private", secret, "Malwina", "strongbox")
    figures = ("kvring serve <hidden> --port", "--api-key <hidden>", "kv-capacity 2560 (--kv-capacity)", "pages 40/128")
    figures += ("req#1 done | ", "engine ready | <model> |", f"Python {platform.python_version()}")
    for shown in (running, killed):
        assert not [one for one in private if one in shown]
        assert not [one for one in figures if one not in shown]
    assert "still running" in running and "ended without a word" in killed


@pytest.mark.skipif(os.name == "nt", reason="there, asking a process to stop is ending it")
def test_a_server_that_a_service_manager_stops_was_not_killed(home):
    with subprocess.Popen([*KVRING, "serve", "phantom", "--port", "0", *SIZES], stderr=subprocess.PIPE) as process:
        try:
            assert any(b"listening" in line for line in process.stderr)
            process.terminate()
            assert process.wait(20) == 0
        finally:
            process.kill()
    assert last()["end"] == "closed"


def ask(port, key, body):
    """Ask until it is ready and answers."""
    for _ in range(600):
        try:
            response = httpx.post(
                f"http://127.0.0.1:{port}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
            )
        except httpx.TransportError:
            time.sleep(0.1)
            continue
        if response.status_code != 503:
            assert response.status_code == 200, response.text
            return
        time.sleep(0.1)
    raise AssertionError("it never answered")


def receipt(home):
    done = subprocess.run([*KVRING, "receipt"], capture_output=True, cwd=home, check=True)
    return done.stdout.decode()


def test_every_value_of_every_flag_is_hidden_unless_its_flag_takes_numbers_or_known_words():
    plain = {setting.flag for setting in SETTINGS if not setting.boolean and not setting.flag.endswith("-path")}
    plain |= {"--port", "--default-max-tokens", "--max-active", "--max-pending", "--pending-timeout", "--on-failure"}
    plain |= {"--max-tokens", "-n", "--temperature", "-t", "--top-p", "--top-k", "--min-p", "--seed"}
    plain |= {"--presence-penalty", "--frequency-penalty", "--repetition-penalty"}
    for command in (serve, run):
        kinds = dict(flags_of(command))
        assert {name for name, kind in kinds.items() if kind == "plain"} <= plain
        for name, kind in kinds.items():
            shown = redact_argv(["x", name, "4242", f"{name}=4242"], command)
            expected = {"plain": [name, "4242"] * 2, "text": [name, HIDDEN] * 2, "switch": [name, HIDDEN, name]}[kind]
            if name.startswith("--"):
                assert shown == ["x", *expected]


FREE = st.text(max_size=8).map(lambda text: f"Ω{text}") | st.text(max_size=8).map(lambda text: f"--Ω{text}")
FLAGS = st.sampled_from(["--", "-v", "--no-reuse", "--stop", "--stop=Ω", "--file", "-f", "--reuse=Ω", "=", "-", ""])


@given(st.lists(FREE | FLAGS))
def test_no_free_word_gets_through_wherever_it_stands(words):
    assert "Ω" not in "".join(redact_argv(["run", *words], run))


@pytest.mark.parametrize(
    "text",
    [
        r"C:\Users\Ann\m.gguf",
        r"C:\Users\The Name Ann\my Ann\m.gguf",
        "D:/models/m.gguf",
        r"\\nas\ann\m.gguf",
        "/srv/ann/m.gguf",
        "/srv/h5 Ann/kvring",
        "~/ann/m.gguf",
        "'/opt/ann'",
    ],
)
def test_a_path_of_any_system_is_scrubbed(text):
    shown = scrub(f"can't open {text}: no, select 4/128 pages")
    assert "ann" not in shown.lower() and shown.endswith("no, select 4/128 pages")


def test_the_places_of_this_install_are_scrubbed():
    from kvring_cli import receipt

    for place in (sys.prefix, Path(receipt.__file__).resolve().parents[2]):
        assert str(place) not in scrub(f"the code runs from {place}") and "<path>" in scrub(f"from {place}/x")


def test_figures_survive_the_scrubbing():
    line = "req#1 done | select 4/128 pages | decode 35.1 tok/s | http://127.0.0.1:8000/v1 | bf16 | 2026-11-30"
    assert scrub(line) == line


def test_only_what_is_made_of_numbers_is_kept_of_an_error(home, resolved):
    for error, kept in (
        (ConfigError("pool of 24 pages", ""), "ConfigError: pool of 24 pages"),
        (RequestError(QUESTION, ""), "RequestError"),
        (ValueError(QUESTION), "ValueError"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ):
        Record(resolved, ["serve", "phantom"]).end(error)
        assert last()["end"] == kept


def test_the_value_of_a_setting_that_takes_free_text_is_not_recorded(home, resolved, monkeypatch):
    free = dataclasses.replace(SETTINGS[0], parse=str)
    monkeypatch.setattr(record_module, "SETTINGS", (free, *SETTINGS[1:]))
    monkeypatch.setitem(resolved.sources, free.field, Effective("private", free.flag))
    Record(resolved, ["serve", "phantom"])
    assert last()["settings"][free.field] == [HIDDEN, free.flag]
    assert last()["settings"]["sink"] == [128, "NINFER_KV_SINK"]


def test_a_refused_start_is_in_the_receipt(home):
    line = ["run", "phantom", QUESTION, "--kv-capacity", "64", "--max-context", "8192"]
    assert subprocess.run([*KVRING, *line], stderr=subprocess.DEVNULL, cwd=home).returncode == 1
    shown = receipt(home)
    assert "ConfigError: a pool of 1 pages (64 tokens) is too small" in shown and "Malwina" not in shown


def test_few_starts_and_few_requests_are_kept(home, resolved, monkeypatch):
    for number in range(KEPT_STARTS + 3):
        monkeypatch.setattr(os, "getpid", lambda number=number: 100_000 + number)
        record = Record(resolved, ["serve", "phantom"])
        for request in range(KEPT_REQUESTS + 5):
            record.request(f"req#{request}")
    assert len(list(record_module.folder().iterdir())) == KEPT_STARTS
    assert last()["requests"] == [f"req#{number}" for number in range(5, KEPT_REQUESTS + 5)]


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"schema": "kvring.start/9"}', "\0"])
def test_a_damaged_record_is_passed_over(home, resolved, damage):
    Record(resolved, ["serve", "phantom"])
    file = record_module.folder() / "999999.json"
    file.write_text(damage)
    os.utime(file, (2**31, 2**31))
    assert last()["pid"] == os.getpid()


def test_a_folder_that_is_another_users_holds_no_record(home, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "glob", refuse)
    assert last() is None


def test_who_wants_no_record_has_none(home, resolved, monkeypatch):
    monkeypatch.setenv("KVRING_RECORD", "0")
    Record(resolved, ["serve", "phantom"]).request("req#1")
    assert last() is None and not record_module.folder().exists()
    assert "none is recorded" in make(gather(import_torch=False))["last start"][0]


def test_a_folder_that_cannot_be_written_costs_the_record_only(home, resolved, monkeypatch):
    file = home / "file"
    file.write_text("")
    monkeypatch.setattr(record_module, "folder", lambda: file / "starts")
    Record(resolved, ["serve", "phantom"]).end()
    assert last() is None


def test_a_change_that_can_not_be_written_leaves_nothing_behind_and_the_next_one_counts(home, resolved, monkeypatch):
    record = Record(resolved, ["serve", "phantom"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(PermissionError("somebody reads it")))
        record.request("req#1")
    assert last()["requests"] == [] and len(list(record_module.folder().iterdir())) == 1
    record.request("req#2")
    assert last()["requests"] == ["req#1", "req#2"]


def test_json_has_the_same_facts_and_a_file_takes_them(home, resolved, tmp_path, capsys):
    Record(resolved, ["serve", "phantom", "--sink", "128"]).end()
    assert call(["receipt", "--json", "-o", str(tmp_path / "r.json")]) == 0 == call(["receipt"])
    report, text = json.loads((tmp_path / "r.json").read_text(encoding="utf-8")), capsys.readouterr().out
    assert "sink 128 (NINFER_KV_SINK)" in report["settings"]
    assert all(line in text for line in report["settings"]) and report["last start"][1] == "closed"
    assert call(["receipt", "-o", str(tmp_path)]) == 1
