"""The routed experts of one token over GGUF blocks, value by value.

Invariants as in `routed_m1.py`, but that rows are rounded to q8_1 instead of fp8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .block_words import UNITS
from .bulk_plan import SHARED_BYTES
from .bulk_q2_k import GateUp
from .bulk_q3_k import Down
from .device import has_bulk_copies, speaks_ptx
from .formats import FORMATS
from .formats.k_expert import BlockShape
from .plain_blocks import plain_block_rows
from .q8_1_rows import q8_1_rows
from .routed_m1_buffers import RoutedBuffers
from .routed_m1_swiglu import gated, rounded

_ROWS = 32


@triton.jit
def _gate_up_kernel(
    pointers, weights, codes, sides, activated, n_experts, limit,
    GATE: tl.constexpr, UP: tl.constexpr, GATE_BYTES: tl.constexpr, UP_BYTES: tl.constexpr,
    GATE_ROW: tl.constexpr, UP_ROW: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    gate_at, up_at = tl.load(pointers + expert), tl.load(pointers + n_experts + expert)
    if gate_at == 0:
        tl.store(activated + expert * WIDTH + rows, tl.zeros([ROWS], tl.float32))
        return
    gate = plain_block_rows(
        gate_at.to(tl.pointer_type(tl.uint8)), codes, sides, rows, rows >= 0,
        GATE, GATE_BYTES, GATE_ROW, HIDDEN,
    )  # fmt: skip
    up = plain_block_rows(
        up_at.to(tl.pointer_type(tl.uint8)), codes, sides, rows, rows >= 0,
        UP, UP_BYTES, UP_ROW, HIDDEN,
    )  # fmt: skip
    value = gated(gate, up, tl.load(weights + expert), limit, BF16)
    tl.store(activated + expert * WIDTH + rows, value)


@triton.jit
def _down_kernel(
    pointers, codes, sides, out, n_experts,
    DOWN: tl.constexpr, DOWN_BYTES: tl.constexpr, DOWN_ROW: tl.constexpr, HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.load(pointers + 2 * n_experts + expert)
    if at == 0:
        return
    units: tl.constexpr = (WIDTH + 127) // 128
    y = plain_block_rows(
        at.to(tl.pointer_type(tl.uint8)), codes + expert * units * 128, sides + expert * units * 8,
        rows, rows >= 0, DOWN, DOWN_BYTES, DOWN_ROW, WIDTH,
    )  # fmt: skip
    tl.store(out + expert * HIDDEN + rows, rounded(y, BF16))


def launch_blocks(
    x: Tensor,
    pointers: Tensor,
    weights: Tensor,
    scratch: RoutedBuffers,
    shape: BlockShape,
    limit: float,
    dtype: torch.dtype,
    *,
    plain: bool,
) -> None:
    """Fill `scratch.parts` with each expert's output.

    What `scratch.row` holds afterwards depends on the kernels that ran.
    """
    n_experts, bf16 = weights.shape[0], dtype == torch.bfloat16
    if has_bulk_copies(x.device) and not plain and fits_bulk(shape):
        from .routed_m1_bulk import launch_bulk  # noqa: PLC0415  wants a GPU's compiler

        launch_bulk(x, pointers, weights, scratch, shape, limit, dtype)
        return
    codes, sides = scratch.row
    row = q8_1_rows(x, out=(codes, sides))
    if speaks_ptx(x.device) and not plain and shape.hidden % 256 == shape.width % 256 == 0:
        from .routed_m1_block_layouts import launch_layouts  # noqa: PLC0415  wants a GPU

        launch_layouts(pointers, weights, scratch, shape, limit, dtype)
        return
    names = (shape.gate, shape.up, shape.down)
    gate, up, down = (UNITS[name].block_bytes for name in names)
    _gate_up_kernel[(shape.width // _ROWS, n_experts)](
        pointers, weights, *row, scratch.activated, n_experts, limit,
        GATE=shape.gate, UP=shape.up, GATE_BYTES=gate, UP_BYTES=up,
        GATE_ROW=row_bytes(shape.gate, shape.hidden), UP_ROW=row_bytes(shape.up, shape.hidden),
        HIDDEN=shape.hidden, WIDTH=shape.width, ROWS=_ROWS, BF16=bf16,
    )  # fmt: skip
    codes, sides = scratch.activated_row
    _down_kernel[(shape.hidden // _ROWS, n_experts)](
        pointers, *q8_1_rows(scratch.activated, out=(codes, sides)), scratch.parts, n_experts,
        DOWN=shape.down, DOWN_BYTES=down, DOWN_ROW=row_bytes(shape.down, shape.width),
        HIDDEN=shape.hidden, WIDTH=shape.width, ROWS=_ROWS, BF16=bf16,
    )  # fmt: skip


def fits_bulk(shape: BlockShape) -> bool:
    """Whether experts have the formats and sizes that programs work on by bulk copies."""
    if (shape.gate, shape.up, shape.down) != ("Q2_K", "Q2_K", "Q3_K"):
        return False
    if shape.hidden % 1024 or shape.width % 256:
        return False
    plans = (GateUp(shape.hidden).plan, Down(shape.width).plan)
    return all(plan.n_bytes <= SHARED_BYTES for plan in plans)


def row_bytes(name: str, k: int) -> int:
    """Return the bytes of a row of k values in a block format."""
    return k // FORMATS[name].BLOCK_VALUES * FORMATS[name].BLOCK_BYTES


def check_blocks(shape: BlockShape) -> None:
    """Raise ValueError for a format without kernels, or rows that are no whole blocks."""
    sizes = ((shape.gate, shape.hidden), (shape.up, shape.hidden), (shape.down, shape.width))
    for name, k in sizes:
        if name not in UNITS:
            raise ValueError(f"routed_m1: format {name}, wanted one of {', '.join(UNITS)}")
        if k % FORMATS[name].BLOCK_VALUES:
            raise ValueError(f"routed_m1: {k} values are no whole blocks of {name}")
