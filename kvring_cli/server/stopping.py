"""How a server ends: requests have some seconds, then hear that it stops, and only then are connections cut."""

from __future__ import annotations

import asyncio
import socket

import uvicorn

from kvring_cli.server.app import make_app
from kvring_cli.server.service import Service

GRACE = 5.0
"""Seconds in which requests may end by themselves."""
_LAST_WORDS = 2
"""Seconds more for answers to reach their clients."""


class Server(uvicorn.Server):
    """uvicorn alone cuts a stream in the middle, and prints where it was waiting."""

    def __init__(self, service: Service, grace: float = GRACE) -> None:
        cut = int(grace) + _LAST_WORDS
        super().__init__(
            uvicorn.Config(make_app(service), log_config=None, lifespan="off", timeout_graceful_shutdown=cut)
        )
        self._service, self._grace = service, grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        told = asyncio.get_running_loop().call_later(self._grace, self._service.tell_of_the_end)
        try:
            await super().shutdown(sockets)
        finally:
            told.cancel()
