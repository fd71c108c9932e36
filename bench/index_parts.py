"""Time of each operator of the indexer, the compressor and Engram on a GPU, at the released sizes.

    python bench/index_parts.py [--repeats N]

One token that sees all of 4,096 and all of 65,536 compressed rows. Each operator is launched many
times in one graph over more copies of its keys than the device's cache holds, so a figure is what a
launch adds to a captured step. Prints one JSON object as the last line.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.parts_report import report_parts
from kernels.engram_gate import engram_gate
from kernels.engram_rows import engram_rows
from kernels.index_keys import index_keys
from kernels.index_queries import index_queries
from kernels.index_scores import index_scores
from kernels.pool_latents import pool_latents
from kernels.select_blocks import select_blocks
from kernels.select_rows import select_rows

HIDDEN, STREAMS, LATENT, HEADS, DIM, TURNED = 5120, 4, 512, 32, 128, 64
TOP_K, TOP_BLOCKS, BLOCK, COLUMNS, ROW_DIM, EPS = 512, 2048, 8, 24, 256, 1e-20
SIZES = (512, 4096, 65536)
CACHE_BYTES = 200_000_000
LAUNCHES = 24
BF16 = torch.bfloat16

Launch = Callable[[int], object]  # takes the number of the launch in the graph


def micros(launch: Launch, repeats: int) -> float:
    """Return the median microseconds of one of the launches in a graph."""
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(LAUNCHES):
            launch(i)
    graph.replay()
    timer = partial(torch.cuda.Event, enable_timing=True)
    times = []
    for _ in range(repeats):
        begin, end = timer(), timer()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / LAUNCHES)
    return float(statistics.median(times))


def index_parts(repeats: int) -> dict[str, float]:
    """Return microseconds of each operator, by name and number of compressed rows."""
    turns = torch.rand(max(SIZES) + 1, TURNED // 2, 2, device="cuda")
    found = {f"{name}_us": micros(part, repeats) for name, part in _row_parts(turns).items()}
    for n_rows in SIZES:
        for name, part in _selection_parts(n_rows).items():
            found[f"{name}_{n_rows}_us"] = micros(part, repeats)
    return found


def _row_parts(turns: Tensor) -> dict[str, Launch]:
    """What one token launches whatever the number of rows."""
    normal = partial(torch.randn, device="cuda")
    first = torch.tensor([4095], device="cuda")
    rows, keys = normal(4096, LATENT, dtype=BF16), normal(4096, DIM, dtype=BF16)
    pooled, one, key = normal(1, 2 * LATENT), normal(1, LATENT), normal(1, DIM)
    kv, scores, norm = normal(2, LATENT), normal(2, LATENT), normal(LATENT)
    queries = normal(1, HEADS * DIM)
    data = torch.randint(0, 120, (COLUMNS, ROW_DIM + ROW_DIM // 32), device="cuda").byte()
    streams = normal(1, STREAMS, HIDDEN, dtype=BF16)
    product, weight = normal(1, (STREAMS + 1) * HIDDEN), normal(STREAMS, HIDDEN)

    return {
        "pool_latents_2": lambda _: pool_latents(
            pooled, first, 2, kv, scores, norm, turns, rows, EPS, dtype=BF16, rounds=True
        ),
        "pool_latents_1": lambda _: pool_latents(
            one, first, 1, None, None, norm, turns, rows, EPS, dtype=BF16, rounds=True
        ),
        "index_keys": lambda _: index_keys(
            key, first, 1, 1, norm[:DIM], turns, keys, EPS, dtype=BF16, rounds=True
        ),
        "index_queries": lambda _: index_queries(
            queries, first, turns, dim=DIM, dtype=BF16, rounds=True
        ),
        "engram_rows": lambda _: engram_rows(data, ROW_DIM, dtype=BF16, rounds=True),
        "engram_gate": lambda _: engram_gate(streams, product, weight, EPS, dtype=BF16),
    }


def _selection_parts(n_rows: int) -> dict[str, Launch]:
    """What one token that sees n_rows compressed rows launches."""
    normal = partial(torch.randn, device="cuda")
    first = torch.tensor([n_rows - 1], device="cuda")
    copies = min(LAUNCHES, CACHE_BYTES // (n_rows * DIM * 2) + 1)
    keys = torch.randint(-3, 4, (copies, n_rows, DIM), device="cuda").to(BF16)
    queries = torch.randint(-3, 4, (1, HEADS, DIM), device="cuda").float()
    heads = normal(1, HEADS)
    scores = torch.empty(1, n_rows, device="cuda")
    index_scores(queries, heads, keys[0], first, 1, dtype=BF16, scores=scores)
    into = torch.empty_like(scores)
    kept = torch.ones(1, -(-n_rows // BLOCK), dtype=torch.uint8, device="cuda")
    return {
        "index_scores": lambda i: index_scores(
            queries, heads, keys[i % copies], first, 1, dtype=BF16, scores=into
        ),
        "select_rows": lambda _: select_rows(scores, first, 1, TOP_K, dtype=BF16),
        "select_rows_f32": lambda _: select_rows(scores, first, 1, TOP_K),
        "select_rows_blocks": lambda _: select_rows(
            scores, first, 1, TOP_K, blocks=kept, block_size=BLOCK, dtype=BF16
        ),
        "select_blocks": lambda _: select_blocks(scores, first, 1, BLOCK, TOP_BLOCKS, dtype=BF16),
    }


if __name__ == "__main__":
    raise SystemExit(report_parts(__doc__, index_parts, 2))
