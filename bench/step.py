"""Speed of the parts of one decode step on a GPU, each as a share of what the memory gives.

    python bench/step.py [--quick] [--layers N] [--rows M]

Weights of the released sizes are made on the device, more of each than its cache holds, and each
part is replayed as one graph. The ceilings, a kernel that copies and one that only reads, are
measured in the same run. Prints one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial

import torch

from kernels.formats.fp4_expert import Fp4Shape
from kernels.gemv import gemv
from kernels.routed_m1 import routed_m1

HIDDEN, WIDTH, TOP_K, LIMIT = 5120, 2304, 6, 10.0
BYTES = 3 * (WIDTH * HIDDEN // 2 + WIDTH * HIDDEN // 32)
CACHE_BYTES = 400_000_000
# name: matrix rows, columns, fp8 or bf16, groups
MATRICES = {
    "wq_a": (1280, 5120, True, 1),
    "wq_b": (32768, 1280, True, 1),
    "wkv": (512, 5120, True, 1),
    "wo_a": (8192, 4096, True, 8),
    "wo_b": (5120, 8192, True, 1),
    "shared_gate_up": (4608, 5120, True, 1),
    "shared_down": (5120, 2304, True, 1),
    "engram_wkv": (25600, 6144, True, 1),
    "router": (384, 5120, False, 1),
    "head": (129280, 5120, False, 1),
}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure the parts of one decode step.")
    parser.add_argument("--quick", action="store_true", help="fewer layers and repetitions")
    parser.add_argument("--layers", type=int, default=40, help="layers of experts")
    parser.add_argument("--rows", type=int, default=1, help="rows for the dense products, 1 to 8")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print(json.dumps({"skipped": "no GPU"}))
        return 0
    n_layers, repeats = (min(args.layers, 8), 3) if args.quick else (args.layers, 7)
    found = {"layers": n_layers, **ceilings(repeats), **experts(n_layers, repeats)}
    best = max(found["copy_tb_s"], found["read_tb_s"])
    found["experts_fraction"] = found["experts_tb_s"] / best
    for name, shape in MATRICES.items():
        micros, tb_s = matrix(*shape, args.rows, repeats)
        found |= {f"{name}_us": micros, f"{name}_fraction": tb_s / best}
        print(f"{name:16} {micros:8.2f} us  {tb_s:5.2f} TB/s  {tb_s / best:.2f} of {best:.2f}")
    print(json.dumps({name: round(value, 4) for name, value in found.items()}))
    return 0


def seconds(launch: Callable[[], object], repeats: int) -> float:
    """Return the median time of one replay of what `launch` launches."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    timer = partial(torch.cuda.Event, enable_timing=True)
    times = []
    for _ in range(repeats):
        begin, end = timer(), timer()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return float(statistics.median(times))


def ceilings(repeats: int) -> dict[str, float]:
    """Return what an elementwise kernel and a plain sum move."""
    source = torch.ones(1 << 30, device="cuda")
    target = torch.empty_like(source)
    n_bytes = source.numel() * 4
    copy = seconds(lambda: torch.add(source, 1.0, out=target), repeats)
    read = seconds(lambda: torch.sum(source), repeats)
    return {"copy_tb_s": 2 * n_bytes / copy / 1e12, "read_tb_s": n_bytes / read / 1e12}


def experts(n_layers: int, repeats: int) -> dict[str, float]:
    """Return bytes of experts read in a second over all layers, and the time of one layer."""
    matrix, scales = WIDTH * HIDDEN // 2, WIDTH * HIDDEN // 32
    piece = matrix + scales
    slots = torch.randint(0, 256, (n_layers * TOP_K, BYTES), dtype=torch.uint8, device="cuda")
    for i in range(3):
        at = i * piece + matrix
        slots[:, at : at + scales].clamp_(118, 124)
    shape = Fp4Shape(HIDDEN, WIDTH, matrix, matrix, matrix)
    starts = slots.data_ptr() + torch.arange(n_layers * TOP_K) * BYTES
    table = torch.stack([starts + i * piece for i in range(3)], 0).view(3, n_layers, TOP_K)
    pointers = [table[:, layer].contiguous().cuda() for layer in range(n_layers)]
    x = torch.randn(1, HIDDEN, device="cuda", dtype=torch.bfloat16)
    weights = torch.rand(TOP_K, device="cuda")
    taken = seconds(lambda: [routed_m1(x, at, weights, shape, LIMIT) for at in pointers], repeats)
    n_bytes = n_layers * TOP_K * BYTES
    return {"experts_tb_s": n_bytes / taken / 1e12, "layer_us": taken / n_layers * 1e6}


def matrix(
    n: int, k: int, fp8_tiles: bool, groups: int, rows: int, repeats: int
) -> tuple[float, float]:
    """Return microseconds of one product and its weights' bytes in TB/s."""
    n_bytes = n * k * (1 if fp8_tiles else 2)
    copies = max(4, CACHE_BYTES // n_bytes)
    scales = None
    if fp8_tiles:
        weight = torch.randint(0, 120, (copies, n, k), dtype=torch.uint8, device="cuda")
        scales = torch.randint(110, 120, (copies, n // 32, k // 32), device="cuda").byte()
    else:
        weight = torch.randn(copies, n, k, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(rows, groups * k, device="cuda")

    def launch() -> None:
        for copy in range(copies):
            gemv(x, weight[copy], None if scales is None else scales[copy], groups=groups)

    taken = seconds(launch, repeats) / copies
    return taken * 1e6, n_bytes / taken / 1e12


if __name__ == "__main__":
    raise SystemExit(main())
