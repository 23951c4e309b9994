"""The risk: a server that is judged by what it didn't say: cut prompts, lost connections, other people's models."""

from __future__ import annotations

import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from engine.errors import ConfigError
from gates.black_box import run
from gates.facts import DISJOINT
from gates.options import GateOptions
from gates.remote import Server
from tests.serving import served


class Fake(BaseHTTPRequestHandler):
    """Answers by looking into the prompt, as a perfect model would; `fault` breaks one thing."""

    fault = ""
    seen: list[str] = []  # noqa: RUF012 (a new one with each server)

    def do_GET(self):
        self._send({"data": [{"id": "/home/someone/perfect.gguf", "meta": {"n_ctx": 5_000}}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = "\n".join(message["content"] for message in body["messages"])
        if self.fault == "error" and len(text) > 6_000:
            return self._send({"error": "too long"}, 400)
        if self.fault == "cuts":
            text = text[-3_000:]
        known = max((_common(text, past) for past in self.seen), default=0) if self.fault != "forgets" else 0
        if self.fault == "remembers wrongly":
            known = len(text)
        time.sleep((len(text) - known) / 200_000)
        self.seen.append(text)
        if body.get("stream"):
            return self._send({})
        answer = "" if self.fault == "empty" and len(text) > 6_000 else find(text)
        usage = {"prompt_tokens": len(text) // 4, "prompt_tokens_details": {"cached_tokens": known // 4}}
        if self.fault == "drifts":
            answer += f" ({len(self.seen)})"
        return self._send({"choices": [{"message": {"content": answer}, "finish_reason": "stop"}], "usage": usage})

    def _send(self, value, status=200):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def _common(one: str, other: str) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def find(text: str) -> str:
    """The value that the text's last line asks for."""
    *_, question = text.strip().splitlines()
    key = question.removeprefix("What is the access code for ").rstrip("?")
    said = [line for line in re.split(r"(?<=[.!?])\s+", text) if key.lower() in line.lower() and line != question]
    for statement, asked in DISJOINT:
        if asked == question:
            start, end = statement.split("{}")
            match = re.search(re.escape(start) + r"(\d+)" + re.escape(end), text)
            return match.group(1) if match else "I don't know."
    digits = re.findall(r"\d{5}", " ".join(said))
    return f"It is {digits[0]}." if digits else "I don't know."


@pytest.fixture
def fake():
    made = []

    def start(fault=""):
        handler = type("Handler", (Fake,), {"fault": fault, "seen": []})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        made.append(server)
        return Server(f"http://127.0.0.1:{server.server_port}", None, 10.0)

    yield start
    for server in made:
        server.shutdown()
        server.server_close()


def ask(server, gate="multi-needle", **options):
    return run(gate, server, GateOptions(quick=True, **options), lambda what, share: None, "prose")


def test_a_perfect_server_passes_beside_a_control_that_cannot(fake):
    report = ask(fake())
    assert report.verdict == "PASS", report.reasons
    assert {arm.kind for arm in report.arms} == {"dense", "positive", "control"} and report.not_run
    assert any("the server's context is 5,000" in note for note in report.notes)
    assert report.environment["served_model"] == "perfect.gguf"


@pytest.mark.parametrize(("fault", "verdict"), [("error", "INCONCLUSIVE"), ("empty", "INCONCLUSIVE"), ("cuts", "FAIL")])
def test_each_fault_of_a_server_gets_its_verdict(fault, verdict, fake):
    assert ask(fake(fault), length=4_000).verdict == verdict


@pytest.mark.parametrize(
    ("gate", "fault", "verdict", "why"),
    [
        ("reuse", "", "PASS", ""),
        ("reuse", "forgets", "FAIL", "first token"),
        ("reuse", "remembers wrongly", "BLIND", "another first word"),
        ("resend", "", "PASS", ""),
        ("resend", "drifts", "FAIL", "the same answer"),
        ("resend", "error", "FAIL", "every request is answered"),
    ],
)
def test_turns_that_are_sent_again_are_judged_from_outside(gate, fault, verdict, why, fake):
    report = ask(fake(fault), gate, length=4_000)
    assert report.verdict == verdict, report.reasons
    assert why in " ".join(report.reasons) and report.not_run


def test_no_server_and_gates_that_need_the_inside_are_refused(fake):
    with pytest.raises(ConfigError, match="doesn't list its models"):
        Server("http://127.0.0.1:9", None, 2.0)
    with pytest.raises(ConfigError, match="no http"):
        Server("localhost:8000", None, 2.0)
    with pytest.raises(ConfigError, match="needs the inside"):
        run("fits", fake(), GateOptions(), lambda what, share: None, "prose")


def test_our_own_server_passes_and_its_recall_can_be_switched_off(phantom):
    with served(phantom) as running:
        server = Server(running.base, None, 60.0)
        report = ask(server, length=4_500)
        turns = [ask(server, gate, length=4_500) for gate in ("reuse", "resend")]
    assert report.verdict == "PASS", report.reasons
    assert [turn.verdict for turn in turns] == ["PASS", "PASS"], [turn.reasons for turn in turns]
    assert any("cached" in check.name for check in turns[0].checks)
    off = next(arm for arm in report.arms if arm.name == "recall off")
    assert off.red and off.hidden_pages > 0
