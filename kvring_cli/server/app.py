"""The application: routes, and in front of them who may come in and whether there is anybody to answer."""

from __future__ import annotations

import hmac
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from engine.errors import KVRingError
from kvring_cli.server import anthropic, chat, completions, info, page, tokenize
from kvring_cli.server.errors import APIError, as_api_error, invalid, speaks_anthropic
from kvring_cli.server.hosts import stranger
from kvring_cli.server.metrics import Metrics
from kvring_cli.server.ring import paint
from kvring_cli.server.service import Service
from kvring_cli.server.sse import GONE
from kvring_cli.server.unread import Unread

OPEN_PATHS = ("/health", *page.FILES)
"""Answered without a key; the page asks for one itself."""


def make_app(service: Service) -> FastAPI:
    app = FastAPI(title="kvring", docs_url=None, redoc_url=None)
    app.state.service, app.state.metrics = service, Metrics(service)
    service.paint = paint
    service.log.observers.append(app.state.metrics.ended)
    for module in (info, chat, completions, anthropic, tokenize):
        app.include_router(module.router)
    page.mount(app)
    app.add_exception_handler(Exception, _refuse)
    for known in (APIError, KVRingError):
        app.add_exception_handler(known, _refuse)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(RequestValidationError, _bad_query)
    app.add_exception_handler(ClientDisconnect, _gone)  # while it still sent its body
    app.add_middleware(Gate, service=service, metrics=app.state.metrics)
    return app


class Gate:
    """In front of every route: host and key, the body's announced size, and 503 while nobody can answer."""

    def __init__(self, app: Any, service: Service, metrics: Metrics) -> None:
        self.app, self.service, self.metrics = app, service, metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        refusal = None
        if scope["type"] == "http":
            unread = Unread(scope, receive, send)
            receive, send = unread.receive, unread.send
            refusal = self._refusal(scope)
        if refusal is None:
            await self.app(scope, receive, send)
        else:
            self.metrics.refused(refusal.code)
            await _response(refusal, scope["path"])(scope, receive, send)

    def _refusal(self, scope: Any) -> APIError | None:
        headers = {name: value for name, value in scope["headers"]}
        settings = self.service.settings
        if (name := stranger(headers.get(b"host"), settings.hosts)) is not None:
            message = f"without a key this server answers to localhost, not '{name}': --allowed-host {name}, or a key"
            return APIError(403, "host_not_allowed", message)
        if settings.api_key and scope["path"] not in OPEN_PATHS and not _may_enter(headers, settings.api_key):
            return APIError(401, "invalid_api_key", "the API key is missing or wrong")
        size = headers.get(b"content-length", b"0")
        if size.isdigit() and int(size) > settings.max_body:
            return APIError(413, "request_too_large", f"the body is larger than {settings.max_body:,} bytes")
        if scope["path"] in OPEN_PATHS or self.service.state == "ready":
            return None
        if self.service.state == "loading":
            return APIError(503, "model_loading", "the model is loading: GET /health tells when it is ready", None, 2)
        return APIError(503, "engine_unavailable", f"the engine is not running: {self.service.error}", None, 10)


def _may_enter(headers: dict[bytes, bytes], key: str) -> bool:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    given = token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
    return hmac.compare_digest(given, key.encode())


def _response(error: APIError, path: str) -> JSONResponse:
    return JSONResponse(error.body(speaks_anthropic(path)), error.status, error.headers)


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    refusal = as_api_error(error)
    request.app.state.metrics.refused(refusal.code)
    return _response(refusal, request.url.path)


async def _bad_query(request: Request, error: Any) -> JSONResponse:
    first = error.errors()[0]
    return await _refuse(request, invalid(f"{first['loc'][-1]}: {first['msg']}", str(first["loc"][-1])))


async def _gone(request: Request, error: Exception) -> Response:
    return GONE


async def _no_route(request: Request, error: Any) -> JSONResponse:
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "bad_request")
    refusal = APIError(error.status_code, code, f"{request.method} {request.url.path}: {error.detail}")
    return _response(refusal, request.url.path)
