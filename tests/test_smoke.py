"""The risk: a smoke test that passes over a broken server, hangs on a dead one, or leaves processes behind."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from gates import child as child_module
from gates.child import Child, free_port
from gates.smoke import START_UP, repeats, run, start_up
from kvring_cli.app import call
from tests import broken_server
from tests.broken_server import LINES

ROOT = Path(__file__).parent.parent
SERVE_EXISTS = importlib.util.find_spec("kvring_cli.commands.serve") is not None


def broken(fault):
    """The command of a server with this fault."""
    return [sys.executable, broken_server.__file__, fault]


def smoke(fault, **more):
    return run("phantom", serve=broken(fault), **{"timeout": 20.0, **more})


def failed(report):
    return [check.name for check in report.checks if not check.ok]


def test_a_good_server_passes():
    report = smoke("none")
    assert (report.verdict, report.exit_code, failed(report)) == ("PASS", 0, []) and report.seconds > 0


@pytest.mark.parametrize(
    ("fault", "noticed"),
    [
        ("quiet", ["start-up lines"]),
        ("wrong", ["turn 1 answers", "turn 2 answers"]),
        ("empty", ["turn 1 answers", "turn 2 answers"]),
        ("parrot", ["turn 1 answers", "turn 2 answers"]),
        ("busy", ["turn 1 is answered"]),
        ("blind", ["control: another beginning finds nothing cached"]),
        ("crashes", ["ready in time"]),
    ],
)
def test_each_fault_of_a_server_is_named(fault, noticed):
    report = smoke(fault)
    assert (report.verdict, report.exit_code, failed(report)) == ("FAIL", 1, noticed)
    assert any(line.startswith("server | ") for line in report.reasons)


def test_where_a_server_will_listen_and_with_which_key_is_not_for_its_trial():
    report = smoke(
        "none", options=["--api-key", "secret", "--port=1", "--strict", "--host", "192.0.2.1", "--port", "2"]
    )
    assert report.verdict == "PASS" and report.environment["options"] == ["--strict"]
    assert "secret" not in json.dumps(report.to_json())


def test_a_server_that_forgets_the_first_turn_fails():
    assert "turn 2 is cached to 90 %" in failed(smoke("amnesia"))


def test_a_server_that_never_gets_ready_is_given_up_in_time():
    began = time.monotonic()
    report = smoke("late", timeout=2.0)
    assert failed(report) == ["ready in time"] and time.monotonic() - began < 15


def test_a_refusal_is_a_verdict_of_its_own_and_says_why():
    report = smoke("refuses")
    assert (report.verdict, report.exit_code) == ("REFUSED", 3)
    assert "server | fix: --max-context 1" in report.reasons


def test_a_refusal_after_the_port_was_bound_is_waited_for():
    report = smoke("can't load")
    assert (report.verdict, report.reasons[-1]) == ("REFUSED", "server | error: the model is damaged")


def test_wrong_values_of_other_models_are_judged_only_when_asked_for():
    serve = broken("wrong")
    assert run("other", serve=serve, timeout=20.0).verdict == "PASS"
    assert run("other", serve=serve, timeout=20.0, strict=True).verdict == "FAIL"


@pytest.mark.skipif(os.name == "nt", reason="there, asking a process to stop is ending it")
def test_a_server_deaf_to_being_stopped_is_killed_and_told_on(monkeypatch):
    monkeypatch.setattr(child_module, "STOP_SECONDS", 1.0)
    assert failed(smoke("deaf")) == ["stops and leaves nothing behind"]


def test_what_a_server_leaves_behind_is_killed_and_told_on():
    report = smoke("parent")
    assert failed(report) == ["stops and leaves nothing behind"]
    assert not [process for process in psutil.Process().children(recursive=True) if "sleep(60)" in str(_line(process))]


def test_an_exception_while_it_runs_stops_the_server():
    with (
        pytest.raises(KeyboardInterrupt),
        Child([*broken("none"), "--port", str(port := free_port())], port) as child,
    ):
        assert child.wait_ready(20.0) == "ready"
        raise KeyboardInterrupt
    assert child.exit_code is not None and not child_module.listening(port)


def test_a_leashed_server_ends_when_its_starter_is_killed():
    code = """
import time
from gates.child import Child, free_port, LEASHED
port = free_port()
child = Child([*LEASHED, "tests.broken_server", "none", "--port", str(port)], port)
print(child.wait_ready(20), child._process.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as starter:
        state, pid = starter.stdout.readline().split()
        server = psutil.Process(int(pid))
        starter.kill()
    assert state == "ready"
    server.wait(10)  # raises where it still runs


@pytest.mark.parametrize("missing", range(len(START_UP)))
def test_a_missing_start_up_line_is_named(missing):
    lines = LINES.splitlines()
    assert start_up(lines).ok
    check = start_up(lines[:missing] + lines[missing + 1 :])
    assert not check.ok and START_UP[missing][0] in check.detail


def test_start_up_lines_out_of_order_do_not_count():
    lines = LINES.splitlines()
    assert not start_up([lines[-1], *lines[:-1]]).ok
    assert not start_up([line.replace("[sum == pool: yes]", "[sum == pool: no]") for line in lines]).ok


def test_a_repetition_is_told_from_an_answer():
    assert repeats("the the the the the the") and repeats("!" * 40) and repeats("I see. It is I see. " * 5)
    assert repeats("It begins well, and then and then and then and then and then and then")
    for answer in ("59024", "The access code is 11111.", "", "ha ha, that is what he said to me", "1, 2, 3, 4, 5, 6"):
        assert not repeats(answer)


def test_the_command_writes_its_report_and_exits_with_the_verdict(monkeypatch, tmp_path, capsys):
    serve = broken("wrong")
    monkeypatch.setattr("gates.smoke.run", lambda model, **more: run(model, **{**more, "serve": serve}))
    path = tmp_path / "report.json"
    assert call(["smoke", "phantom", "--json", str(path), "--timeout", "20", "--", "--kv-capacity", "4032"]) == 1
    report = json.loads(path.read_text(encoding="utf-8"))
    assert (report["gate"], report["verdict"], report["exit_code"]) == ("smoke", "FAIL", 1)
    assert report["environment"]["options"] == ["--kv-capacity", "4032"]
    assert capsys.readouterr().out.splitlines()[-1].startswith("smoke: FAIL  (")


def test_options_alone_leave_the_model_what_it_is(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(
        "gates.smoke.run", lambda model, **more: asked.append((model, more["options"])) or smoke("busy")
    )
    assert call(["smoke", "--", "--kv-capacity", "4032"]) == 1
    assert asked == [("phantom", ["--kv-capacity", "4032"])]


@pytest.mark.slow
@pytest.mark.skipif(not SERVE_EXISTS, reason="there is no kvring serve yet")
def test_the_phantom_served_for_real_passes():
    report = run("phantom")
    assert report.verdict == "PASS", [*report.checks, *report.reasons]


@pytest.mark.skipif(not SERVE_EXISTS, reason="there is no kvring serve yet")
def test_a_real_server_that_refuses_its_settings_is_refused():
    for refused_when in (("--max-context", "1e99"), ("--kv-capacity", "64")):  # reading it; loading the model
        report = run("phantom", options=refused_when)
        assert report.exit_code == 3 and any("fix: " in reason for reason in report.reasons)


def _line(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []
