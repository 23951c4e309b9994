"""GET /metrics: the engine's counters and the requests' times, for Prometheus. One registry per application."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from kvring_cli.server.ask import Answer
    from kvring_cli.server.service import Service

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of requests that were answered.",
    "cached_tokens": "Prompt tokens that were not computed again.",
    "generated_tokens": "Generated tokens.",
    "over_pool": "Requests larger than the pool.",
    "over_pool_without_selection": "Requests larger than the pool that recall selected nothing for: off, or a fault.",
    "layer_pages_fetched": "Pages brought back from the host for recall, counted per layer.",
    "layer_pages_streamed": "Pages streamed through for exact attention, counted per layer.",
    "bytes_fetched": "Bytes brought back from the host.",
    "fetch_seconds": "Seconds spent waiting for pages from the host.",
}
_GAUGES = {
    "pool_pages": "Pages of the device pool.",
    "pool_pages_used": "Pages of the device pool in use.",
    "host_pages": "Pages of the host store.",
    "host_pages_used": "Pages of the host store in use.",
    "checkpoint_pages": "Host pages that later turns can resume from.",
    "pool_bytes": "Bytes of the device pool.",
    "host_bytes": "Bytes of the host store.",
    "host_pinned_bytes": "Bytes of the host store that are pinned.",
    "host_pieces_refused": "Pieces of the host store that could not be pinned and stay pageable.",
    "weight_bytes": "Bytes of the weights.",
}


class Metrics:
    """Counts requests as they end; reads the rest from the worker's last picture."""

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        self._service = service
        self._requests = Counter(
            "kvring_requests", "Requests that ended, by form and how.", ["form", "end"], registry=self.registry
        )
        self._refused = Counter("kvring_refused", "Requests refused, by code.", ["code"], registry=self.registry)
        self._first, self._queue, self._whole = (
            Histogram(f"kvring_{name}_seconds", text, buckets=_SECONDS, registry=self.registry)
            for name, text in (
                ("first_token", "From arrival to the first token."),
                ("queue", "From arrival to admission."),
                ("request", "From arrival to the end."),
            )
        )
        self.registry.register(self)

    def ended(self, answer: Answer, ending: str) -> None:
        self._requests.labels(answer.ask.form, ending).inc()
        if answer.result is not None:
            queued, times = answer.stream.queued, answer.result.timings
            self._queue.observe(queued)
            self._first.observe(queued + times.first_token)
            self._whole.observe(queued + times.first_token + times.decode)

    def refused(self, code: str) -> None:
        self._refused.labels(code).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Any]:
        service, worker = self._service, self._service.worker
        up = GaugeMetricFamily("kvring_ready", "1 while the engine's thread serves.")
        up.add_metric([], float(service.state == "ready"))
        yield up
        yield CounterMetricFamily("kvring_restarts", "Restarts of the engine.", value=service.restarts)
        if worker is None:
            return
        yield GaugeMetricFamily("kvring_active", "Requests being served.", value=len(worker.active))
        yield GaugeMetricFamily("kvring_waiting", "Requests in the queue.", value=len(worker.waiting))
        stats = worker.picture["stats"]
        backend = GaugeMetricFamily("kvring_backend_info", "What computes.", labels=["backend"])
        backend.add_metric([stats["backend"]], 1)
        yield backend
        degraded = GaugeMetricFamily("kvring_backend_degraded", "1 while a faster backend could not serve.")
        degraded.add_metric([], float(bool(stats["backend_degraded"])))
        yield degraded
        graphs = GaugeMetricFamily("kvring_cuda_graph_info", "Whether decode steps are CUDA graphs.", labels=["state"])
        graphs.add_metric([stats["cuda_graph"]], 1)
        yield graphs
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"kvring_{name}", text, value=stats[name])
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"kvring_{name}", text, value=stats[name])
