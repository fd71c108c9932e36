"""What the frontend counts, for Prometheus: requests, tokens, reads, time.

One registry a frontend, so that several can live in one process.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from .answer import Usage
from .graph_counts import GraphCounts

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
_RATES = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000, 10000)
_PICKS = (0, *(10.0**power for power in range(8)))
_BYTES = tuple(10.0**power for power in range(3, 13))
_COMPUTE_GAUGES = ("n_waiting", "n_done", "n_daemons_lost", "up_s")


class Metrics:
    """Counters and histograms of one frontend."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self._responses = Counter(
            "headrace_http_responses", "HTTP responses.", ("path", "status"), registry=registry
        )
        self._endings = Counter(
            "headrace_requests", "Generations by how they ended.", ("end",), registry=registry
        )
        self._tokens = Counter(
            "headrace_tokens", "Tokens of ended requests.", ("kind",), registry=registry
        )
        self._experts = Counter(
            "headrace_expert_picks",
            "Picks by whether they held a slot.",
            ("kind",),
            registry=registry,
        )
        self._seconds = Histogram(
            "headrace_request_seconds",
            "Time of requests by what it went to.",
            ("part",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._rates = Histogram(
            "headrace_tokens_per_second",
            "Rates of requests.",
            ("part",),
            buckets=_RATES,
            registry=registry,
        )
        self._hits = Histogram(
            "headrace_request_hits",
            "Picks of a request found in a tier of memory.",
            ("tier",),
            buckets=_PICKS,
            registry=registry,
        )
        self._misses = Histogram(
            "headrace_request_misses",
            "Picks of a request that were read.",
            buckets=_PICKS,
            registry=registry,
        )
        self._bytes = Histogram(
            "headrace_request_read_bytes",
            "Bytes read from drives for a request.",
            buckets=_BYTES,
            registry=registry,
        )
        self._active = Gauge("headrace_http_active", "Requests in progress.", registry=registry)
        self._joined = Gauge(
            "headrace_compute_joined", "1 while compute is there.", registry=registry
        )
        self._generations = Gauge(
            "headrace_generations", "Requests that compute has taken.", registry=registry
        )
        self._compute = Gauge(
            "headrace_compute", "What compute reports of itself.", ("name",), registry=registry
        )
        self._graphs = GraphCounts()
        registry.register(self._graphs)

    def responded(self, path: str, status: int) -> None:
        """Count an HTTP response; 0 is a client that left before one."""
        self._responses.labels(path, str(status)).inc()

    def ended(self, end: str, usage: Usage) -> None:
        """Count a generation that was taken by compute."""
        self._endings.labels(end).inc()
        self._tokens.labels("prompt").inc(usage.n_prompt)
        self._tokens.labels("cached").inc(usage.n_cached)
        self._tokens.labels("new").inc(usage.n_new)
        self._experts.labels("hit").inc(usage.io["hits"])
        self._experts.labels("miss").inc(usage.io["misses"])
        for tier, hits in usage.tiers.items():
            self._hits.labels(tier).observe(hits)
        self._misses.observe(usage.io["misses"])
        self._bytes.observe(usage.io["bytes_read"])
        for part, milliseconds in (
            ("queue", usage.queue_ms),
            ("prefill", usage.prefill_ms),
            ("decode", usage.decode_ms),
            ("stall", usage.io["stall_ms"]),
            ("copies", usage.io["copy_ms"]),
        ):
            self._seconds.labels(part).observe(milliseconds / 1000)
        for part, rate in (
            ("prefill", usage.prefill_per_second),
            ("decode", usage.decode_per_second),
        ):
            if rate:
                self._rates.labels(part).observe(rate)

    def text(
        self, n_active: int, n_generations: int, compute: Mapping[str, object] | None
    ) -> bytes:
        """Return the exposition; `compute` is what compute reports, None while it is away."""
        self._active.set(n_active)
        self._generations.set(n_generations)
        self._joined.set(compute is not None)
        self._graphs.take(compute or {})
        for name in _COMPUTE_GAUGES:
            value = (compute or {}).get(name)
            if isinstance(value, int | float):
                self._compute.labels(name).set(value)
        return generate_latest(self.registry)
