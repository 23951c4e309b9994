"""GET /v1/ring: what is where, right now. `kvring top` and the page read this.

    {
      "model": "phantom", "state": "ready", "backend": "torch-cpu", "uptime_seconds": 12.5,
      "context_tokens": 32768, "page_tokens": 64, "kv_dtype": "bf16",
      "ring": true,                                                      # false: dense, nothing is ever cold
      "pool": {"pages": 63, "used": 40, "bytes": 33030144},              # pages of the device, each in every layer
      "host": {"pages": 512, "used": 90, "bytes": 268435456, "pinned_bytes": 0, "checkpoint_pages": 80},
      "window": {"sink": 4, "selection": 31, "recent": 24, "free": 4},   # pages; they add up to pool.pages
      "reuse": true, "retrieve": "auto", "scorer": "fused",
      "queue": {"active": 1, "max_active": 4, "waiting": 0, "max_pending": 16},
      "sessions": [{
        "request": 3,                            # the N of `req#N` in the log
        "state": "prefill",                      # prefill | decode
        "mode": "exact",                         # of the phase that runs: exact | recall | window
        "prompt_tokens": 8000, "processed_tokens": 3072, "cached_tokens": 1024,
        "generated_tokens": 0, "max_tokens": 512, "seconds": 1.2,
        "prefill_tokens_per_second": 2100.0, "decode_tokens_per_second": 0.0,
        "over_pool": false,
        "strip": "ssss..kk..wwrro",              # a letter per page of the sequence, in order
        "pages": {"sink": 4, "selected": 2, "recent": 2, "open": 1, "resident": 2, "cold": 4}
      }],
      "totals": {"requests": 2, "prompt_tokens": ..., "cached_tokens": ..., "generated_tokens": ...,
                 "over_pool": 0, "over_pool_without_selection": 0, "layer_pages_fetched": ..., "bytes_fetched": ...}
    }

`?audit=true` adds `"audit": {"clean": true, ...counts}`, or `{"clean": false, "error": ...}`.

Letters: s sink and tool definitions, k selected, r recent, o open, w in the pool without such a reason, `.` cold (host
only). The picture is taken by the engine's thread between steps, so reading it costs the engine nothing; `age_seconds`
says how old it is.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from engine.config import PAGE
from kvring_cli.server.job import Job
from kvring_cli.server.worker import Worker

if TYPE_CHECKING:
    from kvring_cli.server.service import Service

NAMES = {"s": "sink", "k": "selected", "r": "recent", "o": "open", "w": "resident", ".": "cold"}


def paint(worker: Worker) -> dict[str, Any]:
    """On the engine's thread: the engine's counters and its active sessions."""
    return {
        "taken": time.perf_counter(),
        "stats": worker.engine.stats(),
        "sessions": [_session(job) for job in worker.active if job.session is not None],
    }


def ring(service: Service) -> dict[str, Any]:
    """The picture as the route gives it out."""
    engine, worker = service.engine, service.worker
    assert engine is not None and worker is not None
    picture, capacity, window = worker.picture, engine.capacity, engine.capacity.window
    stats = picture["stats"]
    return {
        "model": service.model_id,
        "state": service.state,
        "backend": stats["backend"],
        "uptime_seconds": time.time() - service.created,
        "age_seconds": time.perf_counter() - picture["taken"],
        "context_tokens": capacity.context,
        "page_tokens": PAGE,
        "kv_dtype": capacity.kv,
        "ring": capacity.ring,
        "pool": {"pages": stats["pool_pages"], "used": stats["pool_pages_used"], "bytes": stats["pool_bytes"]},
        "host": {
            "pages": stats["host_pages"],
            "used": stats["host_pages_used"],
            "bytes": stats["host_bytes"],
            "pinned_bytes": stats["host_pinned_bytes"],
            "checkpoint_pages": stats["checkpoint_pages"],
        },
        "window": {
            "sink": window.sink,
            "selection": window.selection,
            "recent": window.recent,
            "free": window.free,
        },
        "reuse": engine.config.reuse,
        "retrieve": engine.config.retrieve,
        "scorer": engine.config.scorer,
        "queue": {
            "active": len(worker.active),
            "max_active": worker.max_active,
            "waiting": len(worker.waiting),
            "max_pending": worker.max_pending,
        },
        "sessions": picture["sessions"],
        "totals": {name: stats[name] for name in TOTALS},
    }


TOTALS = (
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "over_pool",
    "over_pool_without_selection",
    "layer_pages_fetched",
    "layer_pages_streamed",
    "bytes_fetched",
)


def _session(job: Job) -> dict[str, Any]:
    session, prompt = job.session, len(job.prepared.tokens)
    strip = session.places()
    count = Counter(strip)
    now = time.perf_counter()
    filling = bool(session.phases)
    processed = min(session.sequence.length, prompt)
    first = job.first_token or now
    return {
        "request": job.number,
        "state": "prefill" if filling else "decode",
        "mode": session.phases[0].mode if filling else job.prepared.plan.decode,
        "prompt_tokens": prompt,
        "processed_tokens": processed,
        "cached_tokens": session.cached,
        "generated_tokens": job.generated,
        "max_tokens": job.prepared.max_tokens,
        "seconds": now - job.arrived,
        "prefill_tokens_per_second": (processed - session.cached) / max(1e-6, first - (job.admitted or now)),
        "decode_tokens_per_second": (job.generated - 1) / max(1e-6, now - first) if job.generated > 1 else 0.0,
        "over_pool": session.trace.over_pool,
        "strip": strip,
        "pages": {name: count[letter] for letter, name in NAMES.items()},
    }
