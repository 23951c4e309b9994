"""The risk: a server that is judged by what it didn't say: cut prompts, lost connections, other people's models."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from gates import registry
from gates.black_box import run
from gates.black_box_agreement import TIE, against, answered
from gates.child import Child
from gates.context import Context
from gates.facts import DISJOINT
from gates.options import GateOptions
from gates.remote import Reply, Server
from tests.models import phantom_folder
from tests.serving import served

LENGTH = 2_600  # tokens: over the pool of our own server here


class Fake(BaseHTTPRequestHandler):
    """Answers by looking into the prompt, as a perfect model would; `fault` breaks one thing."""

    fault = ""
    seen: list[str] = []  # noqa: RUF012 (a new one with each server)

    def do_GET(self):
        self._send({"data": [{"id": "/home/someone/perfect.gguf", "meta": {"n_ctx": 5_000}}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if isinstance(self.fault, bytes):
            return self._drip(self.fault)
        text = "\n".join(message["content"] for message in body["messages"])
        if self.fault == "strict" and "repeat_penalty" in body:
            return self._send({"error": "unknown field repeat_penalty"}, 422)
        assert self.fault == "strict" or body.get("stream") or body["repeat_penalty"] == 1, "not greedy"
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
        if self.fault == "leaks" and not answer.startswith("It is"):
            answer = find("\n".join([*self.seen, text]))
        usage = {"prompt_tokens": len(text) // 4, "prompt_tokens_details": {"cached_tokens": known // 4}}
        if self.fault == "speechless":
            answer = "I don't know."
        if self.fault == "drifts":
            answer += f" ({len(self.seen)})"
        return self._send({"choices": [{"message": {"content": answer}, "finish_reason": "stop"}], "usage": usage})

    def _send(self, value, status=200):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _drip(self, raw):
        """As it is; at each NUL a pause."""
        for part in raw.split(b"\0"):
            self.wfile.write(part)
            time.sleep(0.2 if b"\0" in raw else 0)

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


@pytest.mark.parametrize(
    ("fault", "verdict", "why"),
    [
        ("", "PASS", ""),
        ("cuts", "FAIL", "prompt length"),
        ("leaks", "BLIND", "another document"),
        ("error", "INCONCLUSIVE", "too long"),
        ("speechless", "WEAK MODEL", "no task counts"),
    ],
)
def test_the_suite_judges_what_is_lost_from_a_short_document_to_a_long_one(fault, verdict, why, fake):
    report = ask(fake(fault), "suite", length=4_000, tasks=("keyed",))
    assert report.verdict == verdict, report.reasons
    assert why in " ".join(report.reasons) and any("can't be chosen" in line for line in report.not_run)


@pytest.fixture(scope="module")
def local(phantom):
    config = EngineConfig(str(phantom_folder()), dtype="float32")
    return Context(config, phantom, GateOptions(quick=True, length=LENGTH), lambda what, share: None)


def test_what_this_engine_holds_against_an_answer(local):
    document = local.document("keyed", 900, 1, asked=2)
    fact = document.asked[0]
    messages = document.messages(fact)
    engine = local.engine(max_context=2_048, ring="off")
    right = fact.expected
    wrong = (right[:-1], right + "1", right[:-1] + str((int(right[-1]) + 1) % 10), "", "I don't know.")
    assert answered(engine, messages)[0] == right
    assert against(engine, messages, Reply(right, "stop")) == against(engine, messages, Reply(right[:3], "length")) == 0
    assert all(against(engine, messages, Reply(text, "stop")) > TIE for text in wrong)
    engine.audit()
    engine.close()


def test_agreement_refuses_to_compare_another_model(fake, local):
    short = replace(local, options=replace(local.options, length=900))
    report = run("agreement", fake(), short.options, local.say, "prose", short)
    assert report.verdict in ("FAIL", "BLIND")
    assert not next(check for check in report.checks if "same model" in check.name).ok
    with pytest.raises(ConfigError, match="compares the server with this engine"):
        ask(fake(), "agreement")


def test_a_server_that_minds_a_field_it_does_not_know_is_asked_without(fake):
    assert ask(fake("strict"), length=4_000).verdict == "PASS"


HTTP = b"HTTP/1.0 200 OK\r\n"
ODD = '{"choices": [{"message": {"content": %s}}], "usage": {"prompt_tokens": %s}, "kvring": [], "error": "%s"}'


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (HTTP + b"\r\n<!doctype html><h1>Gateway</h1>", "no JSON: <!doctype html>"),
        (HTTP + b'\r\n{"choices": [{"mess', "no JSON"),
        (HTTP + b"\r\n" + b"[" * 100_000, "no JSON"),
        (HTTP + b"Content-Length: 900\r\n\r\n{}", "breaks off after 2 of 900 bytes"),
        (HTTP + b"\r\n" + b" " * (17 << 20), "longer than 16 MiB"),
        (HTTP + b"\r\n" + b" \0" * 20, "took longer than 1 s"),
        (HTTP + b"X-Slow: 1\0\r\n" * 20 + b"\r\n{}", "took longer than 1 s"),
        (b"HTTP/1.0 500 Oops\r\nContent-Length: 900\r\n\r\nboom", "HTTP 500: boom"),
        (b"not http at all\r\n", "BadStatusLine"),
        (HTTP + b"\r\nnull", "no chat completion"),
        (HTTP + b'\r\n{"choices": [{"message": 1}]}', "no chat completion"),
    ],
    ids=["html", "half", "deep", "cut", "endless", "dripping", "dripping head", "500 cut", "no http", "null", "odd"],
)
def test_what_is_no_answer_is_a_fault_that_says_why(answer, why, fake):
    server = fake(answer)
    server._timeout = 1.0
    assert why in server.ask([{"role": "user", "content": "?"}], 4).fault


@pytest.fixture
def dripping():
    """The address of a server that says a byte of its status line and headers every 50 ms, and never a body."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    with client, contextlib.suppress(OSError):
                        client.recv(1 << 16)
                        for byte in HTTP + b"X-Slow: yes\r\n" * 50:
                            client.sendall(bytes([byte]))
                            time.sleep(0.05)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_headers_that_drip_are_waited_for_no_longer_than_an_answer_may_take(dripping, fake):
    """Each byte began the time limit anew: a gate waited for hours."""
    server, began = fake(), time.monotonic()
    server._base, server._timeout = f"{dripping}/v1", 0.5
    assert "took longer than 0.5 s" in server.ask([], 4).fault
    assert "took longer than 0.5 s" in server.give_up([], 4)
    with pytest.raises(ConfigError, match=r"took longer than 0\.5 s"):
        Server(dripping, None, 0.5)
    child = SimpleNamespace(port=int(dripping.rpartition(":")[2]))
    with pytest.raises(OSError, match=r"took longer than 0\.5 s"):
        Child.request(child, "/health", timeout=0.5)
    assert time.monotonic() - began < 4 * 0.5 + 2


@pytest.mark.parametrize(
    ("content", "count", "text"), [("5", '"many"', ""), ('[{"text": "a"}, 3]', "1e999", "a"), ("null", "-4", "")]
)
def test_odd_fields_of_an_answer_are_passed_over(content, count, text, fake):
    reply = fake(HTTP + b"\r\n" + (ODD % (content, count, "")).encode()).ask([], 4)
    assert (reply.text, reply.prompt_tokens, reply.fault, reply.ours) == (text, 0, "", False)


def test_a_servers_words_of_an_error_are_left_out_beside_the_users_own_text(fake):
    server = fake(b"HTTP/1.0 422 No\r\n\r\n{'input': 'my secret story'}")
    assert "secret" in server.ask([], 4).fault
    beside = registry.server(server._base, None, GateOptions(haystack="story.txt"))
    assert beside.ask([], 4).fault == "OSError: HTTP 422"


def test_a_conversation_that_the_server_has_read_before_is_not_taken_for_a_cold_one(fake):
    server = fake()
    seeds = [ask(server, "reuse", length=4_000).environment["seeds"] for _ in range(2)]
    assert seeds == [[1], [2]]


def test_no_server_and_gates_that_need_the_inside_are_refused(fake):
    with pytest.raises(ConfigError, match="doesn't list its models"):
        Server("http://127.0.0.1:9", None, 2.0)
    with pytest.raises(ConfigError, match="no http"):
        Server("localhost:8000", None, 2.0)
    with pytest.raises(ConfigError, match="needs the inside"):
        run("fits", fake(), GateOptions(), lambda what, share: None, "prose")


def test_our_own_server_passes_and_its_recall_can_be_switched_off(phantom, local):
    with served(phantom, kv_capacity=24 * 64) as running:
        server = Server(running.base, None, 60.0)
        report = ask(server, length=LENGTH)
        turns = [ask(server, gate, length=LENGTH) for gate in ("reuse", "resend")]
        agreed = run("agreement", server, local.options, local.say, "prose", local)
        suite = ask(server, "suite", length=LENGTH, tasks=("keyed", "multi-value"))
    assert agreed.verdict == "PASS", agreed.reasons
    assert {arm.name for arm in agreed.arms} == {"server", "facts left out", "recall off"}
    assert suite.verdict == "PASS", suite.reasons
    assert any(note.startswith("multi-value: not counted") for note in suite.notes)
    assert {arm.name for arm in suite.arms} == {"exact", "long document", "another document", "recall off"}
    assert report.verdict == "PASS", report.reasons
    assert [turn.verdict for turn in turns] == ["PASS", "PASS"], [turn.reasons for turn in turns]
    assert any("cached" in check.name for check in turns[0].checks)
    off = next(arm for arm in report.arms if arm.name == "recall off")
    assert off.red and off.hidden_pages > 0
