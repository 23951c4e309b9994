"""HTTP whose whole answer, its status line and headers too, comes within a time limit, however slowly it drips.

A socket's own timeout begins anew with each byte.
"""

from __future__ import annotations

import io
import socket
import time
import urllib.request
from functools import partial
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any


def opener(*handlers: urllib.request.BaseHandler) -> urllib.request.OpenerDirector:
    """Its `open(request, timeout=seconds)` counts from the connection on; then reading raises TimeoutError."""
    return urllib.request.build_opener(_Plain, _Secure, *handlers)


class _Reader(io.RawIOBase):
    """A socket's bytes until a moment of `time.monotonic`."""

    def __init__(self, sock: socket.socket, limit: float, until: float) -> None:
        self._sock, self._limit, self._until = sock, limit, until
        self._raw = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        try:
            left = self._until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._sock.settimeout(left)
            return self._raw.readinto(buffer)
        except TimeoutError:
            raise TimeoutError(f"its answer took longer than {self._limit:g} s") from None

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(HTTPResponse):
    def __init__(self, sock: socket.socket, *arguments: Any, limit: float, until: float, **more: Any) -> None:
        super().__init__(sock, *arguments, **more)
        self.fp.close()
        self.fp = io.BufferedReader(_Reader(sock, limit, until))


class _Connection(HTTPConnection):
    def __init__(self, *arguments: Any, timeout: float, **more: Any) -> None:
        super().__init__(*arguments, timeout=timeout, **more)
        self.response_class = partial(_Response, limit=timeout, until=time.monotonic() + timeout)


class _SecureConnection(_Connection, HTTPSConnection):
    pass


class _Plain(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> HTTPResponse:
        return self.do_open(_Connection, request)


class _Secure(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> HTTPResponse:
        return self.do_open(_SecureConnection, request)
