"""A few rows times one dense matrix with explicit layouts, for NVIDIA GPUs.

A lane owns 16 neighbouring weights of a few matrix rows, so that loads are 16 bytes (32 for bf16)
and sums stay in the lane until the end. Matrices of few rows are also split along k over warps.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .early_launch import early
from .early_launch_layouts import join_previous

_VALUES = 16
_REGISTERS = 128
_VECTORS_AHEAD = 12  # loads of 16 weights that a lane may have on their way
_WARPS_TO_BEGIN, _WARPS_TO_FILL = 512, 132 * 8  # one and two for each scheduler of an H200


@gluon.jit
def _gemv_kernel(
    x, weight, scales, out, n, rows_a_group, stride,
    K: gl.constexpr, SCALED: gl.constexpr, M: gl.constexpr, ROWS: gl.constexpr,
    BLOCK: gl.constexpr, UNROLL: gl.constexpr, LAYOUT: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    join_previous(EARLY)
    by_block: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    first = gl.program_id(0) * ROWS
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, by_block))
    block = gl.expand_dims(gl.arange(0, BLOCK, layout=gl.SliceLayout(0, by_block)), 0)
    value = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    at = gl.expand_dims(block, 2) * 16 + gl.expand_dims(gl.expand_dims(value, 0), 0)
    matrix = weight + first.to(gl.int64) * K
    matrix += gl.expand_dims(gl.expand_dims(row.to(gl.int64), 1), 2) * K + at
    x += (first // rows_a_group) * K
    # All rows of a program lie in one row of tiles.
    codes = scales + (first // 32) * (K // 32) + block // 2
    for m in gl.static_range(M):
        total = gl.zeros([ROWS, BLOCK], gl.float32, by_block)
        for start in range(0, K, UNROLL * BLOCK * 16):
            for step in gl.static_range(UNROLL):
                w = gl.load(matrix + start + step * BLOCK * 16).to(gl.float32)
                v = gl.load(x + m * stride + at + start + step * BLOCK * 16)
                sums = gl.sum(w * v, 2)
                if SCALED:
                    code = gl.load(codes + start // 32 + step * (BLOCK // 2)).to(gl.int32)
                    bits = gl.where(code == 0, 0x00400000, code << 23)
                    sums *= bits.to(gl.float32, bitcast=True)
                total += sums
        gl.store(out + m * n + first + row, gl.sum(total, 1))


def tiles(n: int, k: int) -> bool:
    """Whether the layouts fit a matrix, or each group of one, of n rows and k columns."""
    blocks = k // _VALUES
    return k % 32 == 0 and n % (32 // min(32, blocks & -blocks)) == 0


def launch_layouts(
    x: Tensor, weight: Tensor, scales: Tensor | None, out: Tensor, groups: int
) -> None:
    """Fill out [M, n] f32 with x [M, groups * k] f32 times weight [n, k]."""
    n, k = weight.shape
    rows, block, layout, warps = tiling(n, k, n // groups)
    stored = weight if scales is None else weight.view(torch.float8_e4m3fn)
    _gemv_kernel[(n // rows,)](
        x, stored, out if scales is None else scales, out, n, n // groups, x.stride(0),
        K=k, SCALED=scales is not None, M=x.shape[0], ROWS=rows, BLOCK=block,
        UNROLL=unroll(k // (_VALUES * block), layout.size_per_thread[0], n // rows * warps),
        LAYOUT=layout,
        num_warps=warps, maxnreg=_REGISTERS, **early(x.device),
    )  # fmt: skip


def tiling(n: int, k: int, rows_a_group: int) -> tuple[int, int, gl.BlockedLayout, int]:
    """Return rows a program, blocks of 16 a step, the layout of [rows, blocks, 16], and warps."""
    blocks = k // _VALUES
    lanes = min(32, blocks & -blocks)
    most_warps = next(count for count in (8, 4, 2, 1) if blocks % (lanes * count) == 0)
    rows_a_lane, warps = 4, 1  # rows of a lane share what it loads of x
    while rows_a_group % (32 // lanes * rows_a_lane) or (
        rows_a_lane > 1
        # A program has rows of one row of tiles, and there should be warps for every scheduler.
        and (lanes < rows_a_lane or n // (32 // lanes * rows_a_lane) * most_warps < _WARPS_TO_BEGIN)
    ):
        rows_a_lane //= 2
    rows = 32 // lanes * rows_a_lane
    while n // rows * warps < _WARPS_TO_BEGIN and warps < most_warps:
        warps *= 2
    layout = gl.BlockedLayout(
        [rows_a_lane, 1, _VALUES], [32 // lanes, lanes, 1], [1, warps, 1], [2, 1, 0]
    )
    return rows, lanes * warps, layout, warps


def unroll(steps: int, rows_a_lane: int, n_warps: int) -> int:
    """Return how many steps one turn of the loop takes: a divisor whose loads fit the registers.

    Where warps are few, each has twice as many loads on their way.
    """
    most = _VECTORS_AHEAD * (2 if n_warps < _WARPS_TO_FILL else 1) // rows_a_lane
    return max(count for count in range(1, most + 1) if steps % count == 0)
