"""Time of each kernel of one replayed step, and what lies between them, by the profiler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

GAP_US = 5.0  # a longer one counts as a gap


def kernel_times(launch: Callable[[], None], replays: int = 5) -> dict[str, Any]:
    """Return microseconds and calls of each kernel of a step, and the share of time in gaps.

    The step is recorded as one graph; kernels may overlap, so their sum may exceed the whole.
    """
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in found.events()
        if event.device_type.name == "CUDA"
    )
    calls: dict[str, list[float]] = defaultdict(list)
    for start, end, name in spans:
        calls[name].append(end - start)
    gaps, done = [], spans[0][0]
    for start, end, _ in spans:
        gaps.append(max(0.0, start - done))
        done = max(done, end)
    whole = done - spans[0][0]
    table = {name: (sum(times) / replays, len(times) / replays) for name, times in calls.items()}
    return {
        "table": dict(sorted(table.items(), key=lambda item: -item[1][0])),
        "whole_us": whole / replays,
        "launches": len(spans) / replays,
        "gap_share": sum(gap for gap in gaps if gap > GAP_US) / whole,
        "idle_share": sum(gaps) / whole,
    }
