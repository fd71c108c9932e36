"""The routed experts of one token over GGUF blocks with explicit layouts, for NVIDIA GPUs.

Gate and up share the row's words and one loop; a program makes one group of 32 activated values
and rounds it at once, bit for bit as `q8_1_rows` does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .block_layouts import Tiling, load_units, loads_ahead, row_words, tiling, unit_sums
from .block_words import UNITS
from .early_launch import early
from .early_launch_layouts import join_previous
from .formats.k_expert import BlockShape
from .gated_groups import bf16_bits, gated_sums, store_group
from .routed_m1_buffers import RoutedBuffers

_REGISTERS = 128


@gluon.jit
def _gate_up_kernel(
    pointers, weights, codes, sides, out_codes, out_sides, n_experts, limit,
    GATE: gl.constexpr, UP: gl.constexpr, GATE_BYTES: gl.constexpr, UP_BYTES: gl.constexpr,
    BLOCKS: gl.constexpr, WIDTH_UNITS: gl.constexpr, STEPS: gl.constexpr,
    UNITS_A_STEP: gl.constexpr, LAYOUT: gl.constexpr, GATE_LOADS: gl.constexpr,
    UP_LOADS: gl.constexpr, AHEAD: gl.constexpr, BF16: gl.constexpr, WARPS: gl.constexpr,
    EARLY: gl.constexpr = False,
):  # fmt: skip
    join_previous(EARLY)
    expert = gl.program_id(1)
    first = (gl.program_id(0) * 32).to(gl.int64)
    gate_at, up_at = gl.load(pointers + expert), gl.load(pointers + n_experts + expert)
    if gate_at == 0:
        return
    gate_at += first * (BLOCKS * GATE_BYTES)
    up_at += first * (BLOCKS * UP_BYTES)
    gate_next = load_units(
        gate_at, 0, GATE, GATE_BYTES, BLOCKS, 32, UNITS_A_STEP, LAYOUT, GATE_LOADS
    )
    up_next = load_units(up_at, 0, UP, UP_BYTES, BLOCKS, 32, UNITS_A_STEP, LAYOUT, UP_LOADS)
    by_unit: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    gate = gl.zeros([32, UNITS_A_STEP], gl.float32, by_unit)
    up = gl.zeros([32, UNITS_A_STEP], gl.float32, by_unit)
    for step in gl.static_range(STEPS):
        gate_here, up_here = gate_next, up_next
        if step > 0 and not AHEAD:
            gate_here = load_units(
                gate_at, step, GATE, GATE_BYTES, BLOCKS, 32, UNITS_A_STEP, LAYOUT, GATE_LOADS
            )
        row = row_words(codes, sides, step, BLOCKS * 2, UNITS_A_STEP, LAYOUT)
        if AHEAD and step + 1 < STEPS:
            gate_next = load_units(
                gate_at, step + 1, GATE, GATE_BYTES, BLOCKS, 32, UNITS_A_STEP, LAYOUT, GATE_LOADS
            )
        gate += unit_sums(gate_here, row, GATE, LAYOUT)
        if AHEAD and step + 1 < STEPS:
            up_next = load_units(
                up_at, step + 1, UP, UP_BYTES, BLOCKS, 32, UNITS_A_STEP, LAYOUT, UP_LOADS
            )
        if step > 0 and not AHEAD:
            up_here = load_units(
                up_at, step, UP, UP_BYTES, BLOCKS, 32, UNITS_A_STEP, LAYOUT, UP_LOADS
            )
        up += unit_sums(up_here, row, UP, LAYOUT)
    weight = gl.load(weights + expert)
    value = gated_sums(gl.sum(gate, 1), gl.sum(up, 1), weight, limit, BF16)
    store_group(value, out_codes, out_sides, expert, gl.program_id(0), WIDTH_UNITS, WARPS)


@gluon.jit
def _down_kernel(
    pointers, codes, sides, out, n_experts,
    DOWN: gl.constexpr, DOWN_BYTES: gl.constexpr, BLOCKS: gl.constexpr, HIDDEN: gl.constexpr,
    ROWS: gl.constexpr, STEPS: gl.constexpr, UNITS_A_STEP: gl.constexpr, LAYOUT: gl.constexpr,
    LOADS: gl.constexpr, AHEAD: gl.constexpr, BF16: gl.constexpr, EARLY: gl.constexpr = False,
):  # fmt: skip
    join_previous(EARLY)
    expert = gl.program_id(1)
    first = gl.program_id(0) * ROWS
    at = gl.load(pointers + 2 * n_experts + expert)
    if at == 0:
        return
    at += first.to(gl.int64) * (BLOCKS * DOWN_BYTES)
    codes += expert * (BLOCKS * 64)
    sides += expert * (BLOCKS * 16)
    coming = load_units(at, 0, DOWN, DOWN_BYTES, BLOCKS, ROWS, UNITS_A_STEP, LAYOUT, LOADS)
    total = gl.zeros([ROWS, UNITS_A_STEP], gl.float32, gl.SliceLayout(2, LAYOUT))
    for step in gl.static_range(STEPS):
        here = coming
        if step > 0 and not AHEAD:
            here = load_units(at, step, DOWN, DOWN_BYTES, BLOCKS, ROWS, UNITS_A_STEP, LAYOUT, LOADS)
        if AHEAD and step + 1 < STEPS:
            coming = load_units(
                at, step + 1, DOWN, DOWN_BYTES, BLOCKS, ROWS, UNITS_A_STEP, LAYOUT, LOADS
            )
        row = row_words(codes, sides, step, BLOCKS * 2, UNITS_A_STEP, LAYOUT)
        total += unit_sums(here, row, DOWN, LAYOUT)
    by_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    place = gl.arange(0, ROWS, layout=by_row)
    gl.store(out + expert * HIDDEN + first + place, bf16_bits(gl.sum(total, 1), BF16))


def launch_layouts(
    pointers: Tensor,
    weights: Tensor,
    scratch: RoutedBuffers,
    shape: BlockShape,
    limit: float,
    dtype: torch.dtype,
) -> None:
    """Fill `scratch.parts` with each expert's output, from the token's rounded row."""
    n_experts, bf16 = weights.shape[0], dtype == torch.bfloat16
    tile, constants = gate_up_constants(shape, bf16=bf16)
    _gate_up_kernel[(shape.width // 32, n_experts)](
        pointers, weights, *_words(scratch.row), *scratch.activated_row, n_experts, limit,
        **constants, num_warps=tile.warps, maxnreg=_REGISTERS, **early(pointers.device),
    )  # fmt: skip
    tile, constants = down_constants(shape, bf16=bf16)
    _down_kernel[(shape.hidden // tile.rows, n_experts)](
        pointers, *_words(scratch.activated_row), scratch.parts, n_experts,
        **constants, num_warps=tile.warps, maxnreg=_REGISTERS, **early(pointers.device),
    )  # fmt: skip


def gate_up_constants(shape: BlockShape, *, bf16: bool) -> tuple[Tiling, dict[str, Any]]:
    """Return the tiling of gate and up, and what their kernel is compiled for."""
    blocks, ahead = shape.hidden // 256, loads_ahead(shape.gate, shape.up)
    # Two rows of eight words a matrix fit the registers, of the longest units one.
    tile = tiling(2 * blocks, 2 if ahead else 1, rows=32)
    return tile, {
        "GATE": shape.gate,
        "UP": shape.up,
        "GATE_BYTES": UNITS[shape.gate].block_bytes,
        "UP_BYTES": UNITS[shape.up].block_bytes,
        "BLOCKS": blocks,
        "WIDTH_UNITS": shape.width // 128,
        "STEPS": 2 * blocks // tile.units,
        "UNITS_A_STEP": tile.units,
        "LAYOUT": tile.layout,
        "GATE_LOADS": tile.loads_of(shape.gate),
        "UP_LOADS": tile.loads_of(shape.up),
        "AHEAD": ahead,
        "BF16": bf16,
        "WARPS": tile.warps,
    }


def down_constants(shape: BlockShape, *, bf16: bool) -> tuple[Tiling, dict[str, Any]]:
    """Return the tiling of down, and what its kernel is compiled for."""
    blocks = shape.width // 256
    tile = tiling(2 * blocks, 1)
    return tile, {
        "DOWN": shape.down,
        "DOWN_BYTES": UNITS[shape.down].block_bytes,
        "BLOCKS": blocks,
        "HIDDEN": shape.hidden,
        "ROWS": tile.rows,
        "STEPS": 2 * blocks // tile.units,
        "UNITS_A_STEP": tile.units,
        "LAYOUT": tile.layout,
        "LOADS": tile.loads_of(shape.down),
        "AHEAD": loads_ahead(shape.down),
        "BF16": bf16,
    }


def _words(rows: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return codes as i32 words, and sides."""
    codes, sides = rows
    return codes.view(torch.int32), sides
