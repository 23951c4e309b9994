"""A live server in this process: uvicorn in a thread on a free loopback port, over an engine of the loaded phantom."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.load import LoadedModel
from kvring_cli.server.service import ServeSettings, Service
from kvring_cli.server.stopping import Server

CHAT = "/v1/chat/completions"
SMALL = {"max_context": 8192, "kv_capacity": 40 * 64, "prefill_chunk": 256}


def body(**fields: Any) -> dict[str, Any]:
    """A chat request of one word, for two tokens."""
    return {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, **fields}


def error(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The error that this response must be."""
    assert response.status_code == status, response.text[:300]
    assert response.json()["error"]["code"] == code, response.text[:300]
    return response.json()["error"]


class Live:
    """A running server, and a way into the engine that it serves."""

    def __init__(self, service: Service, port: int, server: Server) -> None:
        self.server = server
        self.service, self.base = service, f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.base, timeout=60)

    @property
    def engine(self) -> Engine:
        return self.service.engine

    def audit(self) -> dict[str, int]:
        return self.service.worker.call(lambda: self.engine.audit(deep=True)).result(30)

    def stats(self) -> dict[str, Any]:
        return self.service.worker.call(self.engine.stats).result(30)

    def forget(self) -> None:
        self.service.worker.call(self.engine.forget).result(30)

    def wait(self, condition: Any, seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.02)

    def idle(self) -> bool:
        return not self.service.worker.active and not self.service.worker.waiting

    def chat(self, content: str, **fields: Any) -> dict[str, Any]:
        fields = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}
        response = self.http.post(CHAT, json=fields)
        assert response.status_code == 200, response.text
        return response.json()


@contextmanager
def served(
    model: LoadedModel, settings: ServeSettings | None = None, load: Any = None, log: Any = None, **engine: Any
) -> Iterator[Live]:
    """Ready when the block begins (unless `load` is given), audited and closed when it ends."""
    config = EngineConfig(model="", **{**SMALL, **engine})
    service = Service(load or (lambda loaded: Engine(config, model)), settings or ServeSettings(), log)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = Server(service, grace=1)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    service.start()
    live = Live(service, listener.getsockname()[1], server)
    try:
        live.wait(lambda: server.started)
        if load is None:
            live.wait(lambda: service.state == "ready")
        yield live
        if service.state == "ready":
            live.wait(live.idle)
            live.audit()
    finally:
        live.http.close()
        server.should_exit = True
        thread.join(10)
        service.close()


@contextmanager
def scripted(live: Live, *answers: str) -> Iterator[None]:
    """The next requests answer so: the engine computes as ever, and these tokens are drawn."""
    admit, tokenizer, left = live.engine.admit, live.engine.model.tokenizer, list(answers)

    def admitting(prepared: Any) -> Any:
        session = admit(prepared)
        if left:
            session.force([*tokenizer.encode(left.pop(0), bos=False), tokenizer.eos[0]])
        return session

    live.engine.admit = admitting
    try:
        yield
    finally:
        del live.engine.admit
