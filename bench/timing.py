"""The time of what a function launches, as one graph on a GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch


def seconds(launch: Callable[[], object], repeats: int, *, copies: int = 1) -> float:
    """Return the median time of one run of `launch`, of `copies` in a graph, by replays."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(copies):
            launch()
    graph.replay()
    timer = partial(torch.cuda.Event, enable_timing=True)
    times = []
    for _ in range(repeats):
        begin, end = timer(), timer()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return float(statistics.median(times)) / copies
