"""The risk: a crowd of clients brings the server down, or the command that says it doesn't can't see it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gates.load import run

BROKEN = [sys.executable, str(Path(__file__).parent / "broken_server.py")]
SIZES = ["--max-context", "8192", "--kv-capacity", "2560", "--prefill-chunk", "256"]


@pytest.mark.slow
def test_a_crowd_is_answered_or_refused_by_rule_and_leaves_nothing():
    report = run("phantom", clients=50, seconds=5, options=SIZES)
    assert report.verdict == "PASS", [check for check in report.checks if not check.ok]
    ends = report.environment["ends"]
    assert ends["answered"] > 20 and {"server_overloaded", "left by the client", "refused as nonsense"} <= set(ends)


@pytest.mark.parametrize("fault, blamed", [("busy", "every request"), ("none", "the audit is clean")])
def test_a_server_that_breaks_the_rules_fails(fault, blamed):
    report = run("stub", clients=3, seconds=1, serve=[*BROKEN, fault])
    assert report.verdict == "FAIL"
    assert any(check.name.startswith(blamed) and not check.ok for check in report.checks), report.checks


def test_a_request_beyond_the_pool_ends_as_asked_and_a_server_that_cuts_it_fails():
    from gates import beyond

    report = beyond.run("phantom", prompt=4_000, tokens=40, pool=2_048)
    assert report.verdict == "PASS", report.checks
    cut = beyond.run("stub", prompt=4_000, tokens=40, serve=[*BROKEN, "cut"])
    assert {check.name for check in cut.checks if not check.ok} >= {"ends as asked", "usage is what was asked"}
