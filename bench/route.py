"""Time of the router's decision on a GPU, launch after launch in one replayed graph.

    python bench/route.py

Prints microseconds of one launch for some sizes, beside those of a kernel that does nothing but be
launched, and one JSON object as the last line.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kernels.route_m1 import route_m1, route_rows
from kernels.update_slots import update_slots

LAUNCHES, REPEATS = 200, 9
OFFSETS = (0, 5_898_240, 11_796_480)


def main() -> int:
    """Measure and print."""
    if not torch.cuda.is_available():
        print(json.dumps({"skipped": "no GPU"}))
        return 0
    one = torch.zeros(1, device="cuda")
    found = {"least_us": micros(lambda: one.fill_(1.0))}
    for n_experts, top_k in ((384, 6), (256, 8), (128, 3), (1024, 16)):
        found[f"route_m1_{n_experts}_{top_k}_us"] = micros(decision(n_experts, top_k))
    logits, bias = torch.randn(2048, 384, device="cuda"), torch.zeros(384, device="cuda")
    rows = partial(route_rows, logits, bias, top_k=6, routed_scale=1.5)
    found["route_rows_2048_384_6_us"] = micros(rows)
    table = torch.full((40, 384), -1, dtype=torch.int32, device="cuda")
    triples = torch.stack([torch.arange(40)] * 3, dim=1).int().cuda()
    found["update_slots_40_us"] = micros(partial(update_slots, table, triples, 5000))
    for name, value in found.items():
        print(f"{name:28} {value:8.2f} us")
    print(json.dumps({name: round(value, 3) for name, value in found.items()}))
    return 0


def decision(n_experts: int, top_k: int) -> Callable[[], object]:
    """Return one token's routing, all picks present."""
    table = torch.arange(n_experts, dtype=torch.int32, device="cuda")
    addresses = torch.arange(n_experts, device="cuda") * 20_000_768
    logits = torch.randn(1, n_experts, device="cuda")
    settings: Any = {"top_k": top_k, "routed_scale": 1.5}
    outs = route_m1(logits, torch.zeros_like(logits[0]), table, addresses, OFFSETS, **settings)
    named: Any = dict(zip(("header", "pointers", "weights"), outs, strict=True))
    bias = torch.randn(n_experts, device="cuda")
    return partial(route_m1, logits, bias, table, addresses, OFFSETS, **settings, **named)


def micros(launch: Callable[[], object]) -> float:
    """Return the median time of one launch among many in a replayed graph."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            launch()
    timer = partial(torch.cuda.Event, enable_timing=True)
    times = []
    for _ in range(REPEATS):
        begin, end = timer(), timer()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / LAUNCHES * 1000)
    return float(statistics.median(times))


if __name__ == "__main__":
    raise SystemExit(main())
