"""The dashboard, the alerts and the scrapes name metrics and ports that there are."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from compute.frontend.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
METRIC = re.compile(r"\bheadrace_[a-z_]+")


def known_metrics() -> set[str]:
    daemon = set(
        re.findall(
            r"^\| `(headrace_[a-z_]+)`", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE
        )
    )
    text = Metrics().text(0, 0, None).decode()
    kinds = re.findall(r"^# TYPE (headrace_[a-z_]+) (\w+)$", text, re.MULTILINE)
    found = daemon | {name for name, _ in kinds}
    histograms = {name for name, kind in kinds if kind == "histogram"} | {"headrace_read_seconds"}
    return found | {f"{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")}


def expressions() -> list[str]:
    dashboard = json.loads((DEPLOY / "grafana" / "headrace.json").read_text())
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", [])]
    alerts = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    return [target["expr"] for target in targets] + [rule["expr"] for rule in rules]


def test_every_metric_that_is_drawn_exists():
    used = {name for expression in expressions() for name in METRIC.findall(expression)}
    assert used - known_metrics() == set()
    assert len(used) > 20


def test_brackets_of_every_expression_match():
    for expression in expressions():
        for opening, closing in ("()", "[]", "{}"):
            assert expression.count(opening) == expression.count(closing), expression


def test_no_panel_covers_another():
    panels = json.loads((DEPLOY / "grafana" / "headrace.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place: dict[str, Any] = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_the_scrapes_go_where_the_sample_settings_serve():
    settings = tomllib.loads((DEPLOY / "headrace.toml").read_text())
    scrapes = yaml.safe_load((DEPLOY / "prometheus" / "headrace.yml").read_text())
    jobs = {job["job_name"]: job["static_configs"][0] for job in scrapes["scrape_configs"]}
    frontend = settings["frontend"]
    assert jobs["headrace-expertd"]["targets"] == [settings["daemon"]["metrics"]]
    assert jobs["headrace-frontend"]["targets"] == [f"{frontend['host']}:{frontend['port']}"]
