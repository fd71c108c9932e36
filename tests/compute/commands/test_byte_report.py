"""The progress of pack and verify: a bar for people, objects for scripts, nothing for a file."""

from __future__ import annotations

import io
import json
import sys

import pytest

from compute.commands.byte_report import Report


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def run(report: Report, clock: list[float]) -> dict:
    report.start(4 << 20)
    report.add(1 << 20, was_there=True)
    for _ in range(3):
        clock[0] += 2
        report.add(1 << 20)
    return report.end()


def test_a_terminal_shows_share_rate_and_time_left(monkeypatch, clock):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    facts = run(Report("packing", as_json=False), clock)
    frames = screen.getvalue().split("\r\x1b[K")
    assert "packing [######################--------]  75% 3.0 MiB of 4.0 MiB" in frames[-3]
    assert "512.0 KiB/s, 0:02 left" in frames[-3]
    assert frames[-1] == ""
    assert facts == {
        "bytes": 4 << 20, "bytes_kept": 1 << 20, "seconds": 6.0, "bytes_per_s": 1 << 19
    }  # fmt: skip


def test_a_file_gets_lines_and_no_bar(monkeypatch, clock):
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    report = Report("packing", as_json=False)
    run(report, clock)
    report.line("done")
    assert file.getvalue() == "done\n"


def test_scripts_get_an_object_a_line(capsys, clock):
    run(Report("packing", as_json=True), clock)
    captured = capsys.readouterr()
    events = [json.loads(line) for line in captured.out.splitlines()]
    assert captured.err == ""
    assert events[0] == {"event": "begin", "total_bytes": 4 << 20}
    assert {event["event"] for event in events[1:]} == {"progress"}
    assert events[-2]["left_s"] == 2.0
    assert events[-1]["done_bytes"] == events[-1]["total_bytes"]
