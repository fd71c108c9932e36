"""What ran on a GPU and when, as the profiler saw it: its gaps, and what took how long."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

LEAST_US = 5.0  # of a gap that counts


class Span(NamedTuple):
    """A kernel, a copy or a fill; microseconds."""

    start: float
    end: float
    name: str = ""


def spans_of(step: Callable[[], object], n_steps: int = 1) -> list[Span]:
    """Return what some steps ran on the device, by their starts."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as taken:
        for _ in range(n_steps):
            step()
        torch.cuda.synchronize()
    found = taken.events()
    assert found is not None
    return sorted(
        Span(event.time_range.start, event.time_range.end, event.name)
        for event in found
        if str(event.device_type).endswith("CUDA")
    )


def gaps_of(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Return the gaps over LEAST_US: microseconds since the first start, and how long."""
    found: list[tuple[float, float]] = []
    ordered = sorted(spans)
    reached = ordered[0].end if ordered else 0.0
    for span in ordered[1:]:
        if span.start - reached > LEAST_US:
            found.append((reached - ordered[0].start, span.start - reached))
        reached = max(reached, span.end)
    return found


def gap_share(spans: Iterable[Span]) -> float:
    """Return the share of gaps over LEAST_US of the time from the first start to the last end."""
    ordered = sorted(spans)
    whole = max(span.end for span in ordered) - ordered[0].start if ordered else 0.0
    return sum(gap for _, gap in gaps_of(ordered)) / whole if whole > 0 else 0.0


def busy_us(spans: Iterable[Span]) -> float:
    """Return the time in which anything ran."""
    busy, reached = 0.0, float("-inf")
    for span in sorted(spans):
        busy += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return busy


def by_name(spans: Iterable[Span]) -> list[tuple[float, int, str]]:
    """Return microseconds, how often, and name of all that ran, the longest first."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for span in spans:
        found[span.name].append(span.end - span.start)
    return sorted(((sum(us), len(us), name) for name, us in found.items()), reverse=True)
