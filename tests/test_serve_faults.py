"""The risk: a client that leaves, a full queue or a dead engine shows as a crash, a hang, or as nothing at all."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.errors import EngineError
from engine.runner import Runner
from kvring_cli.server.log import RequestLog
from kvring_cli.server.service import ServeSettings
from tests.serving import CHAT, Live, body, error, served


@pytest.fixture(scope="module")
def live(phantom):
    with served(phantom) as live:
        yield live


def test_who_leaves_while_sending_leaves_no_trace_in_the_log(live, caplog):
    host, port = live.base.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        time.sleep(0.2)
    time.sleep(0.3)
    live.chat("Hello")
    assert not [record for record in caplog.records if record.exc_info or "Exception" in record.getMessage()]


def test_who_is_answered_while_the_server_ends_hears_so(phantom, caplog):
    """The stream broke off after five seconds without a word, and uvicorn printed sixty lines of where it waited."""
    with served(phantom) as live:
        asked = body(stream=True, max_tokens=8000, ignore_eos=True)
        with live.http.stream("POST", CHAT, json=asked) as response:
            lines = response.iter_lines()
            next(lines)
            live.server.should_exit = True
            rest = [line for line in lines if line]
        assert "the server is shutting down" in " ".join(rest[-3:])
        live.wait(lambda: not live.service.worker.alive)
    assert not [record for record in caplog.records if record.exc_info or "Exception" in record.getMessage()]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full disk here")
def test_a_full_disk_ends_the_request_log_and_no_answer(phantom, capsys):
    with served(phantom, log=RequestLog("/dev/full")) as live:
        for _ in range(2):
            live.chat("Hello")
    assert capsys.readouterr().err.count("nothing more is written to /dev/full") == 1


def test_metrics_are_prometheus_text_with_the_engines_counters(live):
    live.chat("Hello")
    response = live.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    for line in (
        "kvring_ready 1.0",
        'kvring_requests_total{end="length",form="openai-chat"}',
        "kvring_pool_pages 40.0",
    ):
        assert line in response.text
    assert "kvring_over_pool_without_selection_total 0.0" in response.text


def test_totals_count_what_clients_asked_and_refusals_at_the_door(phantom):
    with served(phantom, ServeSettings(api_key="k")) as live:
        live.http.headers["Authorization"] = "Bearer k"
        ring = live.http.get("/v1/ring").json()
        assert ring["kv_dtype"] == "fp32" and ring["totals"]["requests"] == 0  # the warm-up was nobody's
        error(live.http.get("/v1/models", headers={"Authorization": "Bearer x"}), 401, "invalid_api_key")
        live.chat("Hello")
        live.wait(lambda: live.http.get("/v1/ring").json()["totals"]["requests"] == 1)
        assert 'kvring_refused_total{code="invalid_api_key"} 1.0' in live.http.get("/metrics").text


def test_a_full_queue_refuses_at_once_and_a_wait_ends_at_its_deadline(phantom):
    settings = ServeSettings(max_active=1, max_pending=1, pending_timeout=0.6)
    with served(phantom, settings) as live:
        hold = live.http.stream("POST", CHAT, json=body(stream=True, max_tokens=8000, ignore_eos=True))
        with hold as response:
            lines = response.iter_lines()
            next(lines)
            waiting: list = []
            thread = threading.Thread(target=lambda: waiting.append(live.http.post(CHAT, json=body())))
            thread.start()
            live.wait(lambda: live.service.worker.waiting)
            full = live.http.post(CHAT, json=body())
            error(full, 429, "server_overloaded")
            assert int(full.headers["retry-after"]) > 0
            thread.join()
            error(waiting[0], 503, "request_queue_timeout")
        live.wait(live.idle)
        live.chat("Hello")


def test_a_stream_in_the_queue_shows_signs_of_life_and_hears_of_its_deadline(phantom):
    settings = ServeSettings(max_active=1, keep_alive=0.1, pending_timeout=0.7)
    with served(phantom, settings) as live:
        hold = live.http.stream("POST", CHAT, json=body(stream=True, max_tokens=8000, ignore_eos=True))
        with hold as response:
            held = response.iter_lines()
            next(held)
            with live.http.stream("POST", CHAT, json=body(stream=True)) as waiting:
                lines = [line for line in waiting.iter_lines() if line]
        assert sum(line.startswith(": keep-alive 0/") for line in lines) >= 3
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "request_queue_timeout"
        live.wait(live.idle)
        with live.http.stream("POST", CHAT, json=body(stream=True, ignore_eos=True)) as response:
            assert list(response.iter_lines())[-2] == "data: [DONE]"


@pytest.mark.parametrize("route", [CHAT, "/v1/messages"])
def test_a_failure_in_one_stream_is_one_error_event_and_no_done(live, monkeypatch, route):
    real, count = Runner.step, iter(range(100))

    def failing(self, steps):
        if next(count) == 4:
            raise EngineError("injected")
        return real(self, steps)

    monkeypatch.setattr(Runner, "step", failing)
    with live.http.stream("POST", route, json=body(stream=True, max_tokens=20, ignore_eos=True)) as response:
        lines = [line for line in response.iter_lines() if line]
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["message"] == "injected"
    assert lines[-2] == "event: error" or route == CHAT
    assert not {"data: [DONE]", "event: message_stop"} & set(lines)
    assert sum('"error"' in line for line in lines) == 1
    monkeypatch.undo()
    live.chat("Hello")
    live.audit()


def test_out_of_memory_inside_a_request_ends_that_request_only(live, monkeypatch):
    real = Runner.step
    monkeypatch.setattr(Runner, "step", lambda self, steps: (_ for _ in ()).throw(MemoryError("no more")))
    error(live.http.post(CHAT, json=body()), 503, "out_of_memory")
    monkeypatch.setattr(Runner, "step", real)
    live.chat("Hello")
    live.audit()


def test_the_audit_can_be_asked_for_and_a_failed_one_is_no_crash(live, monkeypatch):
    from engine.result import AuditError

    live.chat("Hello")
    assert live.http.get("/v1/ring", params={"audit": "true"}).json()["audit"]["clean"] is True
    assert "audit" not in live.http.get("/v1/ring").json()
    error(live.http.get("/v1/ring", params={"audit": "perhaps"}), 400, "invalid_value")
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "audit", lambda self: (_ for _ in ()).throw(AuditError("2: a page has two slots")))
        found = live.http.get("/v1/ring", params={"audit": "true"}).json()["audit"]
    assert found == {"clean": False, "error": "2: a page has two slots"}


def die(live: Live, monkeypatch) -> None:
    def dying(self):
        monkeypatch.undo()
        raise SystemError("killed")

    monkeypatch.setattr(Engine, "step", dying)


def test_a_dead_engine_shows_in_health_and_every_request_hears_of_it(phantom, monkeypatch):
    with served(phantom) as live:
        die(live, monkeypatch)
        error(live.http.post(CHAT, json=body()), 503, "engine_unavailable")
        health = live.http.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "failed" and "killed" in health.json()["error"]
        error(live.http.post(CHAT, json=body()), 503, "engine_unavailable")
        error(live.http.get("/v1/models"), 503, "engine_unavailable")


def test_a_restart_brings_the_engine_back(phantom, monkeypatch):
    with served(phantom, ServeSettings(on_failure="restart")) as live:
        die(live, monkeypatch)
        error(live.http.post(CHAT, json=body()), 503, "engine_unavailable")
        live.wait(lambda: live.http.get("/health").json()["status"] == "ready")
        assert live.http.get("/health").json()["restarts"] == 1
        live.chat("Hello")


def test_while_the_model_loads_only_health_answers(phantom):
    gate = threading.Event()

    def load(loaded):
        from engine.config import EngineConfig

        gate.wait(20)
        return Engine(EngineConfig(model="", max_context=4096, kv_capacity=2048, prefill_chunk=256), phantom)

    with served(phantom, load=load) as live:
        assert live.http.get("/health").json()["status"] == "loading"
        refusals = [live.http.get(path) for path in ("/v1/models", "/metrics", "/v1/ring", "/nothing")]
        for refused in (live.http.post(CHAT, json=body()), *refusals):
            error(refused, 503, "model_loading")
            assert int(refused.headers["retry-after"]) > 0
        gate.set()
        live.wait(lambda: live.http.get("/health").status_code == 200)
        live.chat("Hello")
