"""The time of what a function launches on a GPU, and what the GPU's memory gives at most."""

from __future__ import annotations

import statistics
import time
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


def wall_seconds(launch: Callable[[], object], repeats: int) -> float:
    """Return the median time from calling `launch` until the device has done all of it."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        launch()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return float(statistics.median(times))


def ceilings(repeats: int) -> dict[str, float]:
    """Return what an elementwise kernel and a plain sum move."""
    source = torch.ones(1 << 30, device="cuda")
    target = torch.empty_like(source)
    n_bytes = source.numel() * 4
    copy = seconds(lambda: torch.add(source, 1.0, out=target), repeats)
    read = seconds(lambda: torch.sum(source), repeats)
    return {"copy_tb_s": 2 * n_bytes / copy / 1e12, "read_tb_s": n_bytes / read / 1e12}
