"""One request seen from the event loop: queued, admitted, then its events as they come. Leaving early cancels it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvring_cli.server.errors import APIError
from kvring_cli.server.job import Admitted, Job
from kvring_cli.server.worker import Worker

if TYPE_CHECKING:
    from engine.prepare import Prepared
    from engine.result import Progress, Result, Token


class Stream:
    """Use as `async with`: whatever ends the block, the request holds nothing afterwards."""

    def __init__(
        self,
        worker: Worker,
        prepared: Prepared,
        arrived: float,
        guide: Callable[[int, str], Sequence[int]] | None = None,
        asked_length: bool = False,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[list[Any]] = asyncio.Queue()
        put = self._events.put_nowait
        self.worker = worker
        self.job = Job(
            prepared,
            deliver=lambda events: loop.call_soon_threadsafe(put, events),
            guide=guide,
            asked_length=asked_length,
            arrived=arrived,
        )
        self._begun = self._ended = False

    async def __aenter__(self) -> Stream:
        self.worker.submit(self.job)
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._ended:
            self.worker.cancel(self.job)

    @property
    def queued(self) -> float:
        """Seconds between arrival and admission."""
        return (self.job.admitted or time.perf_counter()) - self.job.arrived

    async def begin(self, timeout: float, patience: float) -> bool:
        """Wait until it leaves the queue, `patience` seconds at most: whether it has.

        APIError 503 at `timeout` seconds after its arrival.
        """
        if self._begun:
            return True
        left = max(0.0, self.job.arrived + timeout - time.perf_counter())
        events = await self._next(min(left, patience))
        if events is None:
            if left > patience:
                return False
            if self.worker.withdraw(self.job):
                self._ended = True
                raise APIError(
                    503,
                    "request_queue_timeout",
                    f"the request waited {timeout:g} s in the queue, the most that --pending-timeout allows",
                    retry_after=10,
                )
            events = await self._events.get()
        if not isinstance(events[0], Admitted):
            self._ended = True
            raise events[0]
        self._begun = True
        return True

    async def events(self, due: Callable[[], float]) -> AsyncIterator[Progress | Token | Result | None]:
        """What happens; None when nothing did until `due` (of perf_counter). An error of the request is raised."""
        from engine.result import Result

        while True:
            events = await self._next(max(0.0, due() - time.perf_counter()))
            if events is None:
                yield None
            for event in events or ():
                if isinstance(event, BaseException):
                    self._ended = True
                    raise event
                self._ended = isinstance(event, Result)
                yield event
                if self._ended:
                    return

    async def _next(self, seconds: float) -> list[Any] | None:
        """What was delivered, or None. Not `wait_for`: before Python 3.12 it loses a cancel that meets an event."""
        getting = asyncio.ensure_future(self._events.get())
        try:
            await asyncio.wait((getting,), timeout=seconds)
            return getting.result() if getting.done() else None
        finally:
            getting.cancel()


async def unless_gone(request: Any, work: Any) -> Any:
    """The result of the coroutine `work`, cancelled as soon as the client goes away; then None."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return None
    finally:
        watch.cancel()
        task.cancel()


async def _gone(request: Any) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
