"""How much of a step a GPU stands still: the share of time in gaps between what it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.profiler import ProfilerActivity, profile

LEAST_US = 5.0  # of a gap that counts


def gap_share(step: Callable[[], object], n_steps: int = 10) -> float:
    """Return the share of some steps' time in gaps over LEAST_US on the device."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as taken:
        for _ in range(n_steps):
            step()
        torch.cuda.synchronize()
    found = taken.events()
    assert found is not None
    return share(
        (event.time_range.start, event.time_range.end)
        for event in found
        if str(event.device_type).endswith("CUDA")
    )


def share(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the share of gaps over LEAST_US of the time from the first start to the last end."""
    ordered = sorted(intervals)
    if not ordered:
        return 0.0
    (begin, reached), idle = ordered[0], 0.0
    for start, end in ordered[1:]:
        if start - reached > LEAST_US:
            idle += start - reached
        reached = max(reached, end)
    return idle / (reached - begin) if reached > begin else 0.0
