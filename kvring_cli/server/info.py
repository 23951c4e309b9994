"""Routes that compute nothing: health, models, metrics, the ring's picture, and tokens of a text."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from engine.result import AuditError
from kvring_cli.server.metrics import CONTENT_TYPE
from kvring_cli.server.ring import ring
from kvring_cli.server.service import Service

router = APIRouter()


def _service(request: Request) -> Service:
    return request.app.state.service


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    service = _service(request)
    state = service.state
    body: dict[str, Any] = {"status": state, "model": service.model_id, "restarts": service.restarts}
    if service.engine is not None:
        body["backend"] = service.engine.backend.name
        if service.engine.degraded:
            body["backend_degraded"] = service.engine.degraded
    if state == "failed":
        body["error"] = str(service.error)
    headers = {"Retry-After": "2"} if state == "loading" else {}
    return JSONResponse(body, 200 if state == "ready" else 503, headers)


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": [_model(_service(request))]}


@router.get("/v1/models/{id:path}")
async def model(request: Request, id: str) -> dict[str, Any]:
    service = _service(request)
    service.check_model(id)
    return _model(service)


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_id,
        "object": "model",
        "created": service.created,
        "owned_by": "kvring",
        "context_length": service.engine.capacity.context if service.engine else None,
    }


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(request.app.state.metrics.text(), media_type=CONTENT_TYPE)


@router.get("/v1/ring")
async def ring_(request: Request, audit: bool = False) -> dict[str, Any]:
    """With `?audit=true` the engine checks its invariants between two steps, and says what it found."""
    service = _service(request)
    if not audit:
        return ring(service)
    try:
        found = await asyncio.wrap_future(service.worker.call(service.engine.audit))
    except AuditError as error:
        return {**ring(service), "audit": {"clean": False, "error": error.message}}
    return {**ring(service), "audit": {"clean": True, **found}}
