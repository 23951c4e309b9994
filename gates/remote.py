"""Any server that speaks OpenAI's chat completions, asked over HTTP: what a gate can know of it from outside."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from engine.errors import ConfigError
from gates.haystack import Message
from gates.within import opener

CONTEXT_FIELDS = ("max_model_len", "context_length", "context_window", "n_ctx", "n_ctx_train")
"""Where servers say, in /v1/models, how long a prompt may be; some put it under `meta`."""

UNPENALISED = {"repeat_penalty": 1.0}
"""llama-cpp-python's own is 1.1, and of 49111 it then says 4911. A server that knows no such field and minds is asked
without."""

_open = opener().open
LARGEST = 16 << 20  # bytes of an answer of a few dozen tokens


@dataclass(frozen=True)
class Reply:
    """One answer, or why there is none (`fault`)."""

    text: str = ""
    finish: str = ""
    prompt_tokens: int = 0
    fault: str = ""
    ours: bool = False  # it carries kvring's own report
    hidden_pages: int = 0
    warnings: tuple[str, ...] = ()
    cached: int | None = None  # prompt tokens that were not computed, by the server's usage; None: it doesn't say
    seconds: float = 0.0  # from asking to the whole answer


class Server:
    """`base` with or without /v1; `model` as the server names it, None = the first it lists. `quoting` False: what it
    says of an error is not kept, since servers repeat the request there.
    """

    def __init__(self, base: str, model: str | None, timeout: float, quoting: bool = True) -> None:
        if not base.startswith(("http://", "https://")):
            raise ConfigError(f"'{base}' is no http:// or https:// address", "--base-url http://127.0.0.1:8000/v1")
        base = base.rstrip("/")
        self._base = base if base.endswith("/v1") else f"{base}/v1"
        self._timeout, self._quoting = timeout, quoting
        self._key = os.environ.get("KVRING_API_KEY", "").strip()
        if not (self._key.isascii() and self._key.isprintable()):
            raise ConfigError("KVRING_API_KEY holds what no header may", "set it to the key alone")
        self._greedy: dict[str, Any] = {"temperature": 0, **UNPENALISED}
        self._answered = False
        listed = self._models(needed=model is None)
        names = [entry["id"] for entry in listed if isinstance(entry.get("id"), str)]
        self.model = model or (names[0] if names else "")
        if not self.model:
            raise ConfigError("the server lists no model", "--served-model NAME")
        entry = next((entry for entry in listed if entry.get("id") == self.model), {})
        self.context = _context({**entry, **_object(entry.get("meta"))})

    def ask(self, messages: Sequence[Message], max_tokens: int, **more: Any) -> Reply:
        """Greedy. Whatever goes wrong is a Reply with a fault."""
        reply = self._ask(messages, max_tokens, more)
        if reply.fault.startswith("OSError: HTTP 4") and not self._answered:
            self._greedy = {"temperature": 0}
            again = self._ask(messages, max_tokens, more)
            if again.fault:  # it was something else
                self._greedy |= UNPENALISED
            else:
                reply = again
        self._answered |= not reply.fault
        return reply

    def _ask(self, messages: Sequence[Message], max_tokens: int, more: dict[str, Any]) -> Reply:
        body = {"model": self.model, "messages": list(messages), "max_tokens": max_tokens, **self._greedy, **more}
        began = time.perf_counter()
        try:
            value = self._call("/chat/completions", body)
            if (reply := _reply(value, time.perf_counter() - began)) is None:
                raise ValueError(f"it answers no chat completion{self._quoted(json.dumps(value).encode())}")
            return reply
        except (OSError, ValueError) as error:
            return Reply(fault=f"{type(error).__name__}: {error}"[:300])

    def give_up(self, messages: Sequence[Message], max_tokens: int) -> str:
        """Ask for a stream and hang up at its first byte; why that could not be, or empty."""
        body = {"model": self.model, "messages": list(messages), "max_tokens": max_tokens, "stream": True}
        try:
            with self._open("/chat/completions", body) as stream:
                stream.read(1)
        except (OSError, HTTPException) as error:
            return f"{type(error).__name__}: {error}"[:300]
        return ""

    def _models(self, needed: bool) -> list[dict[str, Any]]:
        try:
            listed = _object(self._call("/models")).get("data")
            if not isinstance(listed, list):
                raise ValueError("its /models is no list of models")
            return [entry for entry in listed if isinstance(entry, dict)]
        except (OSError, ValueError) as error:
            if not needed and str(error).startswith("HTTP 404"):
                return []
            raise ConfigError(f"the server doesn't list its models: {error}", "start it, or mend --base-url") from None

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """What it answers, as JSON. Raises OSError with what the server said, ValueError where that is no JSON."""
        try:
            with self._open(path, body) as answer:
                said = self._read(answer)
        except urllib.error.HTTPError as error:
            raise OSError(f"HTTP {error.code}{self._said(error)}") from None
        except HTTPException as error:
            raise OSError(f"{type(error).__name__}: {error}") from None
        try:
            return json.loads(said)
        except (ValueError, RecursionError):
            raise ValueError(f"it answers no JSON{self._quoted(said)}") from None

    def _read(self, answer: Any) -> bytes:
        """The whole body."""
        announced, body = answer.length, bytearray()
        while (announced is None or len(body) < announced) and (part := answer.read1(1 << 16)):
            body += part
            if len(body) > LARGEST:
                raise OSError(f"its answer is longer than {LARGEST >> 20} MiB")
        if announced and len(body) < announced:
            raise OSError(f"its answer breaks off after {len(body):,} of {announced:,} bytes")
        return bytes(body)

    def _said(self, error: urllib.error.HTTPError) -> str:
        try:
            return self._quoted(error.read(200))
        except (OSError, HTTPException):
            return ""

    def _quoted(self, said: bytes) -> str:
        return f": {said[:200].decode('utf-8', 'replace')}" if self._quoting else ""

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self._base + path, data, headers)
        return _open(request, timeout=self._timeout)


def _reply(value: Any, seconds: float) -> Reply | None:
    """None where it isn't a chat completion."""
    value = _object(value)
    choices, usage, ours = value.get("choices"), _object(value.get("usage")), _object(value.get("kvring"))
    choice = _object(choices[0] if isinstance(choices, list) and choices else None)
    message, warnings = choice.get("message"), ours.get("warnings")
    if not isinstance(message, dict):
        return None
    return Reply(
        _text(message.get("content")),
        _text(choice.get("finish_reason")),
        _count(usage.get("prompt_tokens")) or 0,
        ours=bool(ours),
        hidden_pages=_count(_object(ours.get("recall")).get("hidden_pages")) or 0,
        warnings=tuple(map(str, warnings)) if isinstance(warnings, list) else (),
        cached=_count(_object(usage.get("prompt_tokens_details")).get("cached_tokens")),
        seconds=seconds,
    )


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    """A string, or the texts of a list of parts."""
    if isinstance(value, list):
        return "".join(_text(_object(part).get("text")) for part in value)
    return value if isinstance(value, str) else ""


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _context(entry: dict[str, Any]) -> int | None:
    return min(filter(None, (_count(entry.get(name)) for name in CONTEXT_FIELDS)), default=None)
