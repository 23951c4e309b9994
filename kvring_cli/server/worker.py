"""The one thread that drives the engine: takes requests from a bounded queue, steps, hands their events out.

What always holds: every engine call but `prepare` is made here; a job gets an end exactly once (Result or exception),
unless it was cancelled; a job that was cancelled holds nothing after the step that was running then.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import TYPE_CHECKING, Any

from engine.errors import KVRingError
from kvring_cli.server.job import Admitted, Job, Overloaded, Unavailable

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.kv.share import WindowBudget

LEAST_SHARE = 8
"""Pages of the pool below which a request can't work: sink, a selection, the recent pages and a chunk."""
PICTURE_SECONDS = 0.25
"""How old the picture of the ring may get while the engine works."""


def most_active(window: WindowBudget, ring: bool, asked: int) -> int:
    """How many requests the pool can be shared among, `asked` at most."""
    return max(1, min(asked, window.pool // LEAST_SHARE)) if ring else max(1, asked)


class Worker:
    """Owns `engine` from `start` to its end. `failure` is set when the thread died of an error."""

    def __init__(self, engine: Engine, max_active: int, max_pending: int, died: Callable[[], None] = lambda: None):
        self.engine = engine
        self.max_active = most_active(engine.capacity.window, engine.capacity.ring, max_active)
        self.max_pending = max_pending
        self.failure: BaseException | None = None
        self.picture: dict[str, Any] = {}
        self.paint: Callable[[Worker], dict[str, Any]] = lambda worker: {}
        self.active: list[Job] = []
        self.waiting: deque[Job] = deque()
        self._died = died
        self._numbers = count(1)
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._closing = False
        self._painted = 0.0
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvring-engine", daemon=True)

    def start(self) -> None:
        self._painted = 0.0
        self._picture()
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self.failure is None and not self._closing and self._thread.is_alive()

    def room(self) -> None:
        """Overloaded if the queue is full, Unavailable if nobody works on it."""
        if not self.alive:
            raise Unavailable("the engine is not running", "see the server's log; GET /health tells when it is back")
        if len(self.waiting) >= self.max_pending + max(0, self.max_active - len(self.active)):
            raise Overloaded(
                f"{len(self.active)} requests are active and {len(self.waiting)} wait, the most that --max-pending "
                f"{self.max_pending} allows",
                "try again later",
            )

    def submit(self, job: Job) -> None:
        """Queue a job. Raises as `room` does."""
        with self._wake:
            self.room()
            job.number = next(self._numbers)
            self.waiting.append(job)
            self._wake.notify()

    def withdraw(self, job: Job) -> bool:
        """Take a job out of the queue; False if it has left it already."""
        with self._wake:
            if job not in self.waiting:
                return False
            self.waiting.remove(job)
            job.cancelled = True
            return True

    def cancel(self, job: Job) -> None:
        """End a job between two steps. Nothing more is delivered."""
        if not self.withdraw(job):
            with self._wake:
                job.cancelled = True
                self._wake.notify()

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Run `function` on this thread between two steps."""
        future: Future[Any] = Future()
        with self._wake:
            if not self.alive:
                raise Unavailable("the engine is not running")
            self._calls.append((function, future))
            self._wake.notify()
        return future

    def close(self, timeout: float = 30) -> None:
        """Cancel what runs and end the thread; the engine is the caller's again."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)

    # --- on the worker's thread ---------------------

    def _run(self) -> None:
        try:
            while self._pause():
                self._turn()
            self._end_all(Unavailable("the server is shutting down"))
        except BaseException as error:  # whatever it is: who waits must hear of it
            self.failure = error
            self._end_all(Unavailable(f"the engine stopped: {type(error).__name__}: {error}"))
            self._died()

    def _pause(self) -> bool:
        """Sleep until there is something to do; False when it is time to end."""
        with self._wake:
            while not (self.active or self.waiting or self._calls or self._closing):
                self._wake.wait()
            return not self._closing

    def _turn(self) -> None:
        self._drop_cancelled()
        self._admit()
        if self.active:
            self.engine.step()
            for job in list(self.active):
                self._hand_out(job)
        while self._calls:
            function, future = self._calls.popleft()
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
        self._picture()

    def _drop_cancelled(self) -> None:
        for job in [job for job in self.active if job.cancelled]:
            self.active.remove(job)
            self.engine.cancel(job.session)

    def _admit(self) -> None:
        """From the queue while there is room: first come, first served, so that no large request waits for ever."""
        while len(self.active) < self.max_active:
            with self._wake:
                if not self.waiting or not self._fits(self.waiting[0]):
                    return
                job = self.waiting.popleft()
                job.admitted = time.perf_counter()
                self.active.append(job)
            try:
                job.session = self.engine.admit(job.prepared)
            except KVRingError as error:
                self.active.remove(job)
                self._deliver(job, [error])
                continue
            self._deliver(job, [Admitted()])
            self._hand_out(job)

    def _fits(self, job: Job) -> bool:
        held = sum(other.need for other in self.active)
        return not self.active or held + job.need <= self.engine.capacity.host_pages

    def _hand_out(self, job: Job) -> None:
        from engine.result import Token

        events = list(job.session.outbox)
        job.session.outbox.clear()
        for event in events:
            if isinstance(event, Token):
                job.generated += 1
                job.first_token = job.first_token or time.perf_counter()
                forced = job.guide(event.id, event.text) if job.guide else ()
                if forced:
                    job.session.force(forced)
        if events:
            self._deliver(job, events)
        if job.session.done:
            self.active.remove(job)

    def _deliver(self, job: Job, events: list[Any]) -> None:
        try:
            job.deliver(events)
        except RuntimeError:  # its event loop is gone
            job.cancelled = True

    def _end_all(self, error: BaseException) -> None:
        with self._wake:
            self._closing = True
            jobs, self.active, waiting = self.active, [], list(self.waiting)
            self.waiting.clear()
        for job in jobs:
            if self.failure is None and job.session is not None:
                self.engine.cancel(job.session)
        for job in [*jobs, *waiting]:
            if not job.cancelled:
                self._deliver(job, [error])
        while self._calls:
            self._calls.popleft()[1].set_exception(error)

    def _picture(self) -> None:
        now = time.perf_counter()
        if now - self._painted >= PICTURE_SECONDS or not self.active:
            self.picture, self._painted = self.paint(self), now
