"""Gaps, busy time and sums by name of what ran on a device."""

from __future__ import annotations

import pytest

from bench.device_spans import Span, busy_us, by_name, gap_share, gaps_of

OVERLAPPING = [Span(10, 20, "a"), Span(0, 12, "b"), Span(24, 30, "a"), Span(50, 60, "c")]


def test_only_long_gaps_count() -> None:
    assert gap_share(OVERLAPPING) == pytest.approx(20 / 60)
    assert sum(gap for _, gap in gaps_of(OVERLAPPING)) == 20
    assert gaps_of([Span(3, 4), Span(10, 11), Span(15, 16)]) == [(1, 6)]
    assert gap_share([]) == gap_share([Span(1, 1)]) == 0.0


def test_what_runs_side_by_side_is_busy_once() -> None:
    assert busy_us(OVERLAPPING) == 20 + 6 + 10
    assert busy_us([Span(0, 9), Span(2, 3)]) == 9


def test_names_come_by_their_time() -> None:
    assert by_name(OVERLAPPING) == [(16, 2, "a"), (12, 1, "b"), (10, 1, "c")]
