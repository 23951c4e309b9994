"""What the server serves with and how far it is: loading, ready or failed; the engine's life from load to close."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.errors import KVRingError
from kvring_cli.server.errors import APIError
from kvring_cli.server.log import RequestLog
from kvring_cli.server.worker import Worker

if TYPE_CHECKING:
    from engine.engine import Engine

MAX_BODY = 32 << 20
"""Bytes of a request: a 262,144-token prompt of four-byte characters is an eighth of it."""


@dataclass(frozen=True)
class ServeSettings:
    """What `kvring serve` was asked for, beside the engine's own settings."""

    model_id: str | None = None
    api_key: str | None = None
    default_max_tokens: int = 32768
    max_active: int = 4
    max_pending: int = 16
    pending_timeout: float = 600.0  # seconds
    on_failure: str = "report"  # report | exit | restart
    keep_alive: float = 5.0  # seconds between comments in a silent stream
    max_body: int = MAX_BODY
    hosts: tuple[str, ...] | None = None  # names beside loopback's that clients may call this server; None: any


class Service:
    """One served model. `load` makes the engine, may be called again with its model after a failure."""

    def __init__(self, load: Callable[[Any], Engine], settings: ServeSettings, log: RequestLog | None = None) -> None:
        self.settings = settings
        self.log = log or RequestLog()
        self.phase = "loading"
        self.error: BaseException | None = None
        self.worker: Worker | None = None
        self.engine: Engine | None = None
        self.created = int(time.time())
        self.restarts = 0
        self.on_ready: Callable[[Service], None] = lambda service: None
        self.on_serving: Callable[[Service], None] = lambda service: None
        self.on_load_failure: Callable[[BaseException], None] = lambda error: None
        self.on_worker_death: Callable[[BaseException], None] = lambda error: None
        self.paint: Callable[[Worker], dict[str, Any]] = lambda worker: {}
        self._load = load
        self._closed = False

    @property
    def model_id(self) -> str:
        if self.settings.model_id:
            return self.settings.model_id
        return self.engine.model.name if self.engine else "loading"

    @property
    def state(self) -> str:
        """loading, ready or failed; it follows the worker, not the listener."""
        if self.phase == "ready" and not (self.worker and self.worker.alive):
            return "failed"
        return self.phase

    def check_model(self, name: str | None) -> None:
        """APIError with the right name for a model that isn't the served one."""
        if name is not None and name != self.model_id:
            raise APIError(
                404, "model_not_found", f"there is no model '{name[:200]}' here: it is '{self.model_id}'", "model"
            )

    def start(self) -> None:
        """Load in the background."""
        threading.Thread(target=self._bring_up, args=(None,), name="kvring-load", daemon=True).start()

    def _bring_up(self, model: Any) -> None:
        try:
            engine = self._load(model)
            engine.warm_up()
            if self._closed:
                return engine.close()
            self.engine = engine
            self.worker = Worker(engine, self.settings.max_active, self.settings.max_pending, self._died)
            self.worker.paint = self.paint
            self.worker.start()
        except BaseException as error:
            self.phase, self.error = "failed", error
            self.on_load_failure(error)
            return
        self.on_ready(self)
        self.phase = "ready"
        self.on_serving(self)

    def _died(self) -> None:
        """On the dying worker's thread, after every client has been told."""
        assert self.worker and self.engine
        self.phase, self.error = "failed", self.worker.failure
        self.on_worker_death(self.worker.failure or KVRingError("the engine stopped"))
        if self.settings.on_failure == "restart" and not self._closed:
            self.restarts += 1
            self.phase = "loading"
            model = self.engine.model
            self.engine.close()  # both tiers go before new ones are made
            threading.Thread(target=self._bring_up, args=(model,), name="kvring-restart", daemon=True).start()

    def tell_of_the_end(self) -> None:
        """End every request with the reason, without waiting for it."""
        self._closed = True
        if self.worker is not None:
            self.worker.close(0)

    def close(self) -> None:
        """End every request, then the engine."""
        self._closed = True
        if self.worker is not None:
            self.worker.close()
        if self.engine is not None:
            self.engine.close()
