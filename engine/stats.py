"""Counters since the engine started, and a picture of what is where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.result import Result
    from engine.runner import Runner


@dataclass
class EngineStats:
    """Token and request totals."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    over_pool: int = 0
    over_pool_without_selection: int = 0

    def count(self, result: Result) -> None:
        self.requests += 1
        self.prompt_tokens += result.usage.prompt
        self.cached_tokens += result.usage.cached
        self.generated_tokens += result.usage.generated
        self.over_pool += result.recall.over_pool
        self.over_pool_without_selection += result.recall.blind

    def snapshot(self, engine: Engine, runner: Runner, checkpoint_pages: int) -> dict[str, Any]:
        runner.collect()
        pool, host, transfer = runner.pool, runner.host, runner.transfer.stats
        return {
            **self.__dict__,
            "backend": engine.backend.name,
            "backend_degraded": engine.degraded,
            "cuda_graph": engine.graphs,
            "kv_dtype": pool.shape.form.dtype.name,
            "pool_pages": pool.slots,
            "pool_pages_used": int((pool.page_in[0] >= 0).sum()),
            "pool_bytes": pool.bytes,
            "host_pages": host.pages,
            "host_pages_used": host.pages - host.free_pages,
            "host_bytes": host.bytes,
            "host_pinned_bytes": host.pinned_bytes,
            "host_pieces_refused": host.pinning.refused + host.pinning.over_budget if host.pinning else 0,
            "digest_bytes": runner.digests.bytes,
            "far_heads": str(runner.digests.far),
            "snapshot_bytes": runner.tails.bytes if runner.tails else 0,
            "weight_bytes": engine.model.transformer.weight_bytes,
            "checkpoint_pages": checkpoint_pages,
            "steps_by": dict(runner.steps),
            "schedules_ran": {f"{key} {schedule}": count for (key, schedule), count in engine.routes.ran.items()},
            **transfer.__dict__,
        }
