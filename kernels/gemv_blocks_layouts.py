"""A few rows times one matrix of blocks with explicit layouts, for NVIDIA GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .block_layouts import Tiling, load_units, row_words, tiling, unit_sums
from .block_words import UNITS
from .early_launch import early
from .early_launch_layouts import join_previous

_REGISTERS = 128
_STEPS_UNROLLED = 10  # at most, so that code stays in its cache
_WARPS_TO_FILL = 132 * 8  # two for each scheduler of the GPU that this was measured on


@gluon.jit
def _gemv_blocks_kernel(
    codes, sides, weight, out, n, rows_a_group, groups,
    FORMAT: gl.constexpr, BYTES: gl.constexpr, BLOCKS: gl.constexpr, ROWS: gl.constexpr,
    UNITS_A_STEP: gl.constexpr, UNROLL: gl.constexpr, LAYOUT: gl.constexpr, LOADS: gl.constexpr,
    EARLY: gl.constexpr = False,
):  # fmt: skip
    join_previous(EARLY)
    m = gl.program_id(0)
    first = gl.program_id(1) * ROWS
    # A row of x is `groups` rows of codes.
    x_row = m * groups + first // rows_a_group
    codes += x_row * (BLOCKS * 64)
    sides += x_row * (BLOCKS * 16)
    at = weight.to(gl.int64, bitcast=True) + first.to(gl.int64) * (BLOCKS * BYTES)
    total = gl.zeros([ROWS, UNITS_A_STEP], gl.float32, gl.SliceLayout(2, LAYOUT))
    for start in range(0, BLOCKS * 2, UNROLL * UNITS_A_STEP):
        begin = at + (start // 2) * BYTES
        units = load_units(
            begin, 0, FORMAT, BYTES, BLOCKS, ROWS, UNITS_A_STEP, LAYOUT, LOADS
        )  # fmt: skip
        for step in gl.static_range(UNROLL):
            here = units
            if step + 1 < UNROLL:
                units = load_units(
                    begin, step + 1, FORMAT, BYTES, BLOCKS, ROWS, UNITS_A_STEP, LAYOUT, LOADS
                )  # fmt: skip
            row = row_words(
                codes + start * 4, sides + start * 8, step, BLOCKS * 2, UNITS_A_STEP, LAYOUT
            )
            total += unit_sums(here, row, FORMAT, LAYOUT)
    by_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    gl.store(out + m * n + first + gl.arange(0, ROWS, layout=by_row), gl.sum(total, 1))


def tiles(n: int, rows_a_group: int, k: int, name: str) -> bool:
    """Whether the layouts fit a matrix of n rows and k columns, and each group of its rows."""
    return k % 256 == 0 and rows_a_group % matrix_tiling(n, rows_a_group, k, name).rows == 0


def matrix_tiling(n: int, rows_a_group: int, k: int, name: str) -> Tiling:
    """Return the layouts for a matrix of n rows and k columns."""
    n_units = k // 128
    lanes = min(16, n_units & -n_units)
    # Of the formats of three pieces two rows do not fit the registers.
    few = n * lanes // 64 < _WARPS_TO_FILL or rows_a_group % (64 // lanes)
    return tiling(n_units, 1 if few or UNITS[name].halves else 2)


def launch_layouts(
    codes: Tensor, sides: Tensor, weight: Tensor, name: str, out: Tensor, groups: int
) -> None:
    """Fill out [M, n] f32 from q8_1 rows and a weight [n, bytes a row] u8."""
    n, blocks = weight.shape[0], weight.shape[1] // UNITS[name].block_bytes
    tile = matrix_tiling(n, n // groups, blocks * 256, name)
    _gemv_blocks_kernel[(out.shape[0], n // tile.rows)](
        codes.view(torch.int32), sides, weight, out, n, n // groups, groups,
        **constants(weight, name, tile), num_warps=tile.warps, maxnreg=_REGISTERS,
        **early(codes.device),
    )  # fmt: skip


def constants(weight: Tensor, name: str, tile: Tiling) -> dict[str, Any]:
    """Return what the kernel is compiled for."""
    block_bytes = UNITS[name].block_bytes
    blocks = weight.shape[1] // block_bytes
    return {
        "FORMAT": name,
        "BYTES": block_bytes,
        "BLOCKS": blocks,
        "ROWS": tile.rows,
        "UNITS_A_STEP": tile.units,
        "UNROLL": _unroll(2 * blocks // tile.units, tile, name),
        "LAYOUT": tile.layout,
        "LOADS": tile.loads_of(name),
    }


def _unroll(steps: int, tile: Tiling, name: str) -> int:
    """Return how many steps one turn takes: a divisor; an even one where addresses need it."""
    fitting = [count for count in range(1, _STEPS_UNROLLED + 1) if steps % count == 0]
    # One turn must not move blocks by two bytes against a multiple of four.
    if UNITS[name].halves and tile.units == 2:
        fitting = [count for count in fitting if count % 2 == 0 or count == steps] or [steps]
    return max(fitting)
