"""What the server says of itself: the lines at start-up, one line per request, and the same as JSON lines."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.units import GIB, MIB
from kvring_cli import console
from kvring_cli.start import kv_line

if TYPE_CHECKING:
    from engine.engine import Engine
    from kvring_cli.server.ask import Answer


class RequestLog:
    """One line to stderr for each request that ended, and one to `file` if there is one. Never any content.

    `keep` takes the line too.
    """

    def __init__(self, file: str | None = None, keep: Callable[[str], None] = lambda line: None) -> None:
        self._keep = keep
        self._file = Path(file).open("a", encoding="utf-8") if file else None  # noqa: SIM115 (open as long as the server)
        self._turn = threading.Lock()
        self.observers: list[Any] = []

    def done(self, answer: Answer) -> None:
        result, recall, times = answer.result, answer.result.recall, answer.result.timings
        counts = result.usage
        prefill, decode = times.rates(counts)
        share = 100 * counts.cached / max(1, counts.prompt)
        fields = [
            f"req#{answer.stream.job.number} done",
            answer.ask.form,
            answer.finish,
            f"prompt {counts.prompt:,}",
            f"cache {counts.cached:,} ({share:.1f}%)",
            f"output {counts.generated:,}",
            f"TTFT {1000 * (times.first_token + answer.stream.queued):,.0f} ms",
            f"queue {1000 * answer.stream.queued:,.0f} ms",
            f"prefill {prefill:,.0f} tok/s",
            f"decode {decode:,.1f} tok/s",
            f"select {recall.pages_selected:,} pages",
            f"host {recall.layer_pages_fetched:,} hits, {recall.bytes_fetched / MIB:,.0f} MiB",
        ]
        self._say(" | ".join(fields))
        for warning in answer.warnings():
            console.warn(f"req#{answer.stream.job.number}: {warning}")
        self._write(answer, answer.finish)

    def failed(self, answer: Answer, code: str) -> None:
        job = answer.stream.job
        self._say(
            f"req#{job.number} {'cancelled' if code == 'cancelled' else 'failed'} | {answer.ask.form} | {code} | "
            f"prompt {len(answer.prepared.tokens):,} | output {job.generated:,}"
        )
        self._write(answer, code)

    def _say(self, line: str) -> None:
        console.say(line)
        self._keep(line)

    def _write(self, answer: Answer, ending: str) -> None:
        job, result = answer.stream.job, answer.result
        for observe in self.observers:
            observe(answer, ending)
        if self._file is None:
            return
        line = {
            "time": time.time(),
            "request": job.number,
            "form": answer.ask.form,
            "end": ending,
            "prompt_tokens": len(answer.prepared.tokens),
            "completion_tokens": job.generated,
            "max_tokens": answer.prepared.max_tokens,
            "max_tokens_source": answer.length_source,
            "queue_seconds": answer.stream.queued,
        }
        if result is not None:
            line |= {
                "cached_tokens": result.usage.cached,
                "prefill_seconds": result.timings.prefill,
                "first_token_seconds": result.timings.first_token,
                "decode_seconds": result.timings.decode,
                **{f"recall_{name}": value for name, value in vars(result.recall).items()},
                "warnings": answer.warnings(),
            }
        with self._turn:
            try:
                self._file.write(json.dumps(line) + "\n")
                self._file.flush()
            except OSError as error:  # a full disk takes no answer with it
                console.warn(f"nothing more is written to {self._file.name}: {error.strerror or error}")
                self.close()

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with contextlib.suppress(OSError):  # what it still holds, it could not write before
                file.close()


def ready_lines(engine: Engine, seconds: float) -> list[str]:
    """From `device profile` to `reuse`, in the order in which tools look for them."""
    capacity, window, config = engine.capacity, engine.capacity.window, engine.config
    total = window.sink + window.selection + window.recent + window.free
    runtime = capacity.pool_bytes + capacity.digest_bytes + capacity.staging_bytes + capacity.workspace_bytes
    return [
        _profile(engine),
        _backend(engine),
        _scoring(engine),
        f"engine ready | {engine.model.name} | total {seconds:.1f}s | weights {capacity.weight_bytes / GIB:.2f} GiB",
        f"capacity | KV {capacity.pool_pages * 64:,} tokens, {capacity.kv}, "
        f"{'auto' if config.kv_capacity is None else 'explicit'} | pages {capacity.pool_pages:,}/"
        f"{capacity.logical_pages:,} | runtime {runtime / GIB:.2f} GiB | free {_free(engine) / GIB:.2f} GiB",
        f"[ring] budgets: sink={window.sink}, selection={window.selection}, recent={window.recent}, "
        f"free={window.free} (pool {window.pool}) [sum == pool: {'yes' if total == window.pool else 'no'}]",
        f"host store {capacity.host_bytes / GIB:.2f} GiB, committed, "
        f"{capacity.host_pages / capacity.logical_pages:.1f} contexts of {capacity.context:,} tokens "
        f"({capacity.host_reason}) | {_host_memory(engine)}",
        f"reuse host-backed: {'on' if config.reuse else 'off'}",
        kv_line(capacity),
        f"compute | {engine.compute}",
        *([engine.chunk_note] if engine.chunk_note else []),
    ]


def _profile(engine: Engine) -> str:
    row = engine.profile.profile
    name = row.hardware_class if row else engine.model.transformer.device.type
    return f"device profile {name}: {engine.routes.routed} routed keys ({engine.routes.source})"


def _backend(engine: Engine) -> str:
    backend = engine.backend
    graphs = "" if engine.graphs == "none" else f" | CUDA graphs {engine.graphs}"
    return f"backend {backend.name}: {backend.reason}{graphs}" + (
        f" | DEGRADED: {engine.degraded}" if engine.degraded else ""
    )


def _host_memory(engine: Engine) -> str:
    """What the host store is made of; pinning goes on in the background."""
    stats = engine.stats()
    if engine.model.transformer.device.type == "cpu":
        return "ordinary (the CPU computes)"
    if engine.config.host_memory == "pageable":
        return "pageable, as asked"
    refused = stats["host_pieces_refused"]
    return f"pinned {stats['host_pinned_bytes'] / GIB:.2f} GiB so far, {refused} pieces stay pageable"


def _scoring(engine: Engine) -> str:
    config = engine.config
    if not engine.capacity.ring:
        return "[ring] content scoring idle: the pool holds the whole context, nothing is ever cold"
    if config.retrieve == "off":
        return "[ring] content scoring OFF (--retrieve off): a prompt over the pool is answered blind"
    scored = f"scorer {config.scorer}, keys of {engine.far_heads}"
    return f"[ring] content scoring ON by default (the ring is configured): {scored}"


def _free(engine: Engine) -> int:
    """Memory that is left where the pool lies."""
    import psutil
    import torch

    device = engine.model.transformer.device
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
