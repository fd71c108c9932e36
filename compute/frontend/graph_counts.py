"""What compute counts of its graphs, as Prometheus counters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

GRAPH_COUNTS = {
    "launches": "Parts of tokens launched, replayed or eagerly.",
    "eager": "Parts of tokens launched one kernel after the other.",
    "replays": "Graphs replayed.",
    "captures": "Graphs captured.",
    "recaptures": "Graphs thrown away, since what they bake in had changed.",
    "misses": "Layers that ran again since a pick was absent.",
    "failures": "Captures that failed.",
    "routes_checked": "Routing decisions of layers compared with the host's, by --check-routes.",
    "hints": "Absent experts foreseen by --lookahead and told to the daemon.",
}


class GraphCounts(Collector):
    """`headrace_graph_*_total`, as compute last reported them; 0 where it launches no graphs."""

    def __init__(self) -> None:
        self._values: Mapping[str, object] = {}

    def take(self, report: Mapping[str, object]) -> None:
        """Take what compute reports of itself."""
        self._values = report

    def collect(self) -> Iterable[Metric]:
        """Yield a counter of each count."""
        for name, text in GRAPH_COUNTS.items():
            value = self._values.get(f"graph_{name}")
            number = value if isinstance(value, int | float) else 0
            yield CounterMetricFamily(f"headrace_graph_{name}", text, value=number)
