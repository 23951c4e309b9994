"""Every refusal as HTTP: status, code and message, in the form that the route's clients know."""

from __future__ import annotations

from typing import Any

from engine.errors import ContextLengthError, HostFullError, KVRingError, OutOfMemoryError, RequestError
from kvring_cli.server.job import Overloaded, Unavailable

_OPENAI_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class APIError(Exception):
    """What a client is told instead of an answer. `param` names the field that is wrong."""

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param, self.retry_after = status, code, message, param, retry_after

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return {**headers, "WWW-Authenticate": "Bearer"} if self.status == 401 else headers

    def body(self, anthropic: bool) -> dict[str, Any]:
        if anthropic:
            kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
            return {"type": "error", "error": {"type": kind, "message": self.message, "code": self.code}}
        kind = _OPENAI_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def speaks_anthropic(path: str) -> bool:
    return path.startswith("/v1/messages")


def invalid(message: str, param: str | None = None) -> APIError:
    return APIError(400, "invalid_value", message, param)


def as_api_error(error: BaseException) -> APIError:
    """What went wrong below, as a client must hear it."""
    message = str(error) or type(error).__name__
    match error:
        case APIError():
            return error
        case Overloaded():
            return APIError(429, "server_overloaded", message, retry_after=5)
        case Unavailable():
            return APIError(503, "engine_unavailable", message, retry_after=5)
        case HostFullError():
            return APIError(429, "kv_exhausted", message, retry_after=10)
        case ContextLengthError():
            return APIError(400, "context_length_exceeded", message, "messages")
        case RequestError():
            return invalid(message)
        case OutOfMemoryError():
            return APIError(503, "out_of_memory", message, retry_after=10)
        case KVRingError():
            return APIError(500, "engine_error", message)
        case _:
            return APIError(500, "internal_error", f"{type(error).__name__}: {error}")
