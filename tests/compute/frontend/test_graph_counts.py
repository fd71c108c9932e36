"""Compute's graph counters as the frontend shows them."""

from __future__ import annotations

from pathlib import Path

from compute.frontend.graph_counts import GRAPH_COUNTS
from compute.frontend.metrics import Metrics
from compute.graph.recording import GraphCounters

ROOT = Path(__file__).resolve().parents[3]


def test_every_counter_of_compute_has_its_metric_and_its_row() -> None:
    assert set(GraphCounters().values()) == set(GRAPH_COUNTS)
    page = (ROOT / "docs" / "serving.md").read_text()
    for name, text in GRAPH_COUNTS.items():
        assert f"| `headrace_graph_{name}_total` | counter |  | {text} |" in page


def test_counts_are_those_that_compute_reported() -> None:
    metrics = Metrics()
    assert "headrace_graph_replays_total 0.0" in metrics.text(0, 0, {"n_done": 3}).decode()
    text = metrics.text(0, 0, {"graph_replays": 12, "graph_mode": "segment"}).decode()
    assert "headrace_graph_replays_total 12.0" in text
    assert "graph_mode" not in text
    assert "headrace_graph_replays_total 0.0" in metrics.text(0, 0, None).decode()
