"""Experts and dense matrices of GGUF blocks in one decode step. Used by bench/step.py."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.timing import seconds
from kernels.block_words import UNITS
from kernels.formats.k_expert import BlockShape
from kernels.gemv_blocks import gemv_blocks
from kernels.q8_1_rows import empty_rows
from kernels.routed_m1 import routed_m1
from kernels.routed_m1_buffers import RoutedBuffers

HIDDEN, WIDTH, TOP_K, LIMIT = 5120, 2304, 6, 10.0
CACHE_BYTES = 400_000_000
FORMATS = {
    "q2k-q3k": ("Q2_K", "Q2_K", "Q3_K"),
    "q4k": ("Q4_K", "Q4_K", "Q4_K"),
    "q8_0": ("Q8_0", "Q8_0", "Q8_0"),
}
# name: matrix rows, columns, format, groups
MATRICES = {
    "wq_b_q4_k": (32768, 1280, "Q4_K", 1),
    "wq_b_q8_0": (32768, 1280, "Q8_0", 1),
    "wo_a_q4_k": (8192, 4096, "Q4_K", 8),
    "wo_b_q4_k": (5120, 8192, "Q4_K", 1),
    "shared_gate_up_q2_k": (4608, 5120, "Q2_K", 1),
    "shared_down_q3_k": (5120, 2304, "Q3_K", 1),
    "head_q6_k": (129280, 5120, "Q6_K", 1),
}
# The upper bytes of f16 scales: made small, so that no value is infinite.
_SCALES = {"Q2_K": (81, 83), "Q3_K": (109,), "Q4_K": (1, 3), "Q6_K": (209,)}


def block_experts(name: str, n_layers: int, repeats: int) -> dict[str, float]:
    """Return bytes of experts read in a second over all layers, and the time of one layer."""
    gate, up, down = FORMATS[name]
    shape = BlockShape(HIDDEN, WIDTH, gate, up, down)
    n = n_layers * TOP_K
    pieces = [
        random_blocks(n, rows, columns, kind)
        for rows, columns, kind in (
            (WIDTH, HIDDEN, gate),
            (WIDTH, HIDDEN, up),
            (HIDDEN, WIDTH, down),
        )
    ]
    number = torch.arange(n)
    starts = [piece.data_ptr() + number * piece.stride(0) for piece in pieces]
    table = torch.stack(starts).view(3, n_layers, TOP_K)
    pointers = [table[:, layer].contiguous().cuda() for layer in range(n_layers)]
    x = torch.randn(1, HIDDEN, device="cuda", dtype=torch.bfloat16)
    weights = torch.rand(TOP_K, device="cuda")
    buffers = RoutedBuffers.new(shape, TOP_K, "cuda")

    def launch() -> None:
        for at in pointers:
            routed_m1(x, at, weights, shape, LIMIT, buffers=buffers)

    taken = seconds(launch, repeats)
    n_bytes = sum(piece.numel() for piece in pieces)
    return {"experts_tb_s": n_bytes / taken / 1e12, "layer_us": taken / n_layers * 1e6}


def block_matrix(
    n: int, k: int, name: str, groups: int, rows: int, repeats: int
) -> tuple[float, float]:
    """Return microseconds of one product, its rounding included, and its weights' TB/s."""
    n_bytes = n * (k // 256) * UNITS[name].block_bytes
    weight = random_blocks(max(4, CACHE_BYTES // n_bytes), n, k, name)
    x = torch.randn(rows, groups * k, device="cuda")
    scratch = empty_rows(rows * groups, k, x.device)
    out = torch.empty(rows, n, device="cuda")

    def launch() -> None:
        for copy in weight:
            gemv_blocks(x, copy, name, groups=groups, rows=scratch, out=out)

    taken = seconds(launch, repeats) / weight.shape[0]
    return taken * 1e6, n_bytes / taken / 1e12


def random_blocks(copies: int, n: int, k: int, name: str) -> Tensor:
    """Return random matrices [copies, n, bytes of k values] u8 whose scales are small."""
    size = UNITS[name].block_bytes
    shape = (copies, n, k // 256 * size)
    data = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    tame(data.view(-1, size), name)
    return data


def tame(blocks: Tensor, name: str) -> None:
    """Make the scales of blocks [n, bytes of 256 values] small."""
    for at in _SCALES.get(name, range(1, blocks.shape[1], 34)):
        blocks[:, at] = 0x14
