"""What every piece of one response says of itself."""

from __future__ import annotations

import time
import uuid
from typing import Any

from kvring_cli.server import sse


class Frame:
    """`kind` is OpenAI's object name, `prefix` that of its ids."""

    def __init__(self, model: str, kind: str, prefix: str) -> None:
        self.head = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return sse.event({**self.head, "object": f"{self.head['object']}.chunk", "choices": choices, **more})
