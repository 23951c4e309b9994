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

CONTEXT_FIELDS = ("max_model_len", "context_length", "context_window", "n_ctx", "n_ctx_train")
"""Where servers say, in /v1/models, how long a prompt may be; some put it under `meta`."""

UNPENALISED = {"repeat_penalty": 1.0}
"""llama-cpp-python's own is 1.1, and of 49111 it then says 4911. A server that knows no such field and minds is asked
without."""


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
    """`base` with or without /v1; `model` as the server names it, None = the first it lists."""

    def __init__(self, base: str, model: str | None, timeout: float) -> None:
        if not base.startswith(("http://", "https://")):
            raise ConfigError(f"'{base}' is no http:// or https:// address", "--base-url http://127.0.0.1:8000/v1")
        base = base.rstrip("/")
        self._base = base if base.endswith("/v1") else f"{base}/v1"
        self._timeout = timeout
        self._greedy: dict[str, Any] = {"temperature": 0, **UNPENALISED}
        self._answered = False
        listed = self._models()
        names = [str(entry.get("id")) for entry in listed]
        self.model = model or (names[0] if names else "")
        if not self.model:
            raise ConfigError("the server lists no model", "--served-model NAME")
        entry = next((entry for entry in listed if entry.get("id") == self.model), {})
        self.context = _context({**entry, **(entry.get("meta") or {})})

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
            choice, usage = value["choices"][0], value.get("usage") or {}
            ours = value.get("kvring") or {}
            return Reply(
                choice["message"].get("content") or "",
                choice.get("finish_reason") or "",
                int(usage.get("prompt_tokens") or 0),
                ours=bool(ours),
                hidden_pages=int((ours.get("recall") or {}).get("hidden_pages") or 0),
                warnings=tuple(ours.get("warnings") or ()),
                cached=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
                seconds=time.perf_counter() - began,
            )
        except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
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

    def _models(self) -> list[dict[str, Any]]:
        try:
            return [entry for entry in self._call("/models")["data"] if isinstance(entry, dict)]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"the server doesn't list its models: {error}", "start it, or mend --base-url") from None

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Raises OSError with what the server said."""
        try:
            with self._open(path, body) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise OSError(f"HTTP {error.code}: {error.read()[:200].decode('utf-8', 'replace')}") from None
        except HTTPException as error:
            raise OSError(f"{type(error).__name__}: {error}") from None

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("KVRING_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self._base + path, data, headers)
        return urllib.request.urlopen(request, timeout=self._timeout)


def _context(entry: dict[str, Any]) -> int | None:
    sizes = [entry[name] for name in CONTEXT_FIELDS if isinstance(entry.get(name), int) and entry[name] > 0]
    return min(sizes, default=None)
