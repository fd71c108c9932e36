"""The routed experts of one token over Q2_K gate and up and Q3_K down, by rows copied in bulk.

Gate and up round the token's row themselves, each program for itself, and the activated values a
group of 32 a program; both bit for bit as `q8_1_rows` does. Wants GPUs of `has_bulk_copies`.

Invariants: a row's sum does not depend on the other experts. All of shared memory is addressed by
the PTX of `bulk_q2_k.py` and `bulk_q3_k.py`, but for its last slice, the compiler's own. Down asks
for its rows before it joins gate and up: these have joined what wrote addresses and weights.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import bulk_q2_k, bulk_q3_k
from .bulk_q2_k import GateUp
from .bulk_q3_k import Down
from .early_launch import early
from .early_launch_layouts import join_previous
from .formats.k_expert import BlockShape
from .gated_groups import bf16_bits, gated_sums, store_group
from .routed_m1_buffers import RoutedBuffers
from .shared_slices import reserve
from .tensor_checks import check_contiguous

# A thread's, for two programs and for three on a multiprocessor.
_GATE_UP_REGISTERS, _DOWN_REGISTERS = 128, 80


@gluon.jit
def _warps(ASM: gl.constexpr, thread, first, second):
    """Run PTX on all threads, with two addresses."""
    gl.inline_asm_elementwise(
        ASM, "=r,r,l,l", [thread, first + thread * 0, second + thread * 0], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _bulk_gate_up_kernel(
    pointers, weights, row, out_codes, out_sides, n_experts, limit,
    ROW_BYTES: gl.constexpr, WIDTH_UNITS: gl.constexpr, SLICES: gl.constexpr, BEGIN: gl.constexpr,
    ROW: gl.constexpr, PRODUCTS: gl.constexpr, RESULT: gl.constexpr, BF16: gl.constexpr,
    WARPS: gl.constexpr, EARLY: gl.constexpr = False,
):  # fmt: skip
    join_previous(EARLY)
    expert, group = gl.program_id(1), gl.program_id(0)
    gate_at, up_at = gl.load(pointers + expert), gl.load(pointers + n_experts + expert)
    if (gate_at == 0) | (up_at == 0):  # of both: so both loads are on their way
        return
    reserve(SLICES, WARPS)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    thread = gl.arange(0, 32 * WARPS, layout=line)
    more = (group * 32).to(gl.int64) * ROW_BYTES
    _warps(BEGIN, thread, gate_at + more, up_at + more)
    row_at = row.to(gl.int64, bitcast=True)
    _warps(ROW, thread, row_at, row_at)
    _warps(PRODUCTS, thread, gate_at + more, up_at + more)
    place = gl.arange(0, 32, layout=line)
    gate, up = gl.inline_asm_elementwise(
        RESULT, "=f,=f,r", [place], dtype=(gl.float32, gl.float32), is_pure=False, pack=1
    )
    value = gated_sums(gate, up, gl.load(weights + expert), limit, BF16)
    store_group(value, out_codes, out_sides, expert, group, WIDTH_UNITS, WARPS)


@gluon.jit
def _bulk_down_kernel(
    pointers, codes, sides, out, n_experts,
    ROW_BYTES: gl.constexpr, UNITS: gl.constexpr, HIDDEN: gl.constexpr, ROWS: gl.constexpr,
    SLICES: gl.constexpr, BEGIN: gl.constexpr, ROW: gl.constexpr, PRODUCTS: gl.constexpr,
    RESULT: gl.constexpr, BF16: gl.constexpr, WARPS: gl.constexpr, EARLY: gl.constexpr = False,
):  # fmt: skip
    expert, group = gl.program_id(1), gl.program_id(0)
    at = gl.load(pointers + 2 * n_experts + expert)
    if at == 0:
        join_previous(EARLY)
        return
    reserve(SLICES, WARPS)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    thread = gl.arange(0, 32 * WARPS, layout=line)
    at += (group * ROWS).to(gl.int64) * ROW_BYTES
    _warps(BEGIN, thread, at, at)
    join_previous(EARLY)
    codes += expert * (UNITS * 32)
    sides += expert * (UNITS * 8)
    _warps(ROW, thread, codes.to(gl.int64, bitcast=True), sides.to(gl.int64, bitcast=True))
    _warps(PRODUCTS, thread, at, at)
    place = gl.arange(0, ROWS, layout=line)
    y = gl.inline_asm_elementwise(RESULT, "=f,r", [place], dtype=gl.float32, is_pure=False, pack=1)
    gl.store(out + expert * HIDDEN + group * ROWS + place, bf16_bits(y, BF16))


def launch_bulk(
    x: Tensor,
    pointers: Tensor,
    weights: Tensor,
    scratch: RoutedBuffers,
    shape: BlockShape,
    limit: float,
    dtype: torch.dtype,
) -> None:
    """Fill `scratch.parts` with each expert's output, from the token's row itself."""
    n_experts, bf16 = weights.shape[0], dtype == torch.bfloat16
    check_contiguous("routed_m1", x=x)
    if x.storage_offset() * x.element_size() % 16:
        x = x.clone()  # lanes load 16 bytes
    constants = gate_up_constants(shape, bf16=bf16, bf16_row=x.dtype == torch.bfloat16)
    _bulk_gate_up_kernel[(shape.width // bulk_q2_k.ROWS, n_experts)](
        pointers, weights, x, *scratch.activated_row, n_experts, limit,
        **constants, num_warps=constants["WARPS"], maxnreg=_GATE_UP_REGISTERS,
        **early(pointers.device),
    )  # fmt: skip
    codes, sides = scratch.activated_row
    constants = down_constants(shape, bf16=bf16)
    _bulk_down_kernel[(shape.hidden // bulk_q3_k.ROWS, n_experts)](
        pointers, codes.view(torch.int32), sides, scratch.parts, n_experts, **constants,
        num_warps=constants["WARPS"], maxnreg=_DOWN_REGISTERS, **early(pointers.device),
    )  # fmt: skip


@lru_cache(maxsize=16)
def gate_up_constants(shape: BlockShape, *, bf16: bool, bf16_row: bool) -> dict[str, Any]:
    """Return what the kernel of gate and up is compiled for.

    bf16, bf16_row  whether results are rounded to bf16, whether the token's row comes in it
    """
    how = GateUp(shape.hidden)
    return {
        "ROW_BYTES": how.plan.row_bytes,
        "WIDTH_UNITS": shape.width // 128,
        "SLICES": how.plan.slices,
        "BEGIN": how.begin(),
        "ROW": how.token_row(bf16=bf16_row),
        "PRODUCTS": how.products(),
        "RESULT": how.result(),
        "BF16": bf16,
        "WARPS": bulk_q2_k.N_WARPS,
    }


@lru_cache(maxsize=16)
def down_constants(shape: BlockShape, *, bf16: bool) -> dict[str, Any]:
    """Return what the kernel of down is compiled for, and whether it rounds results to bf16."""
    how = Down(shape.width)
    return {
        "ROW_BYTES": how.plan.row_bytes,
        "UNITS": how.plan.units,
        "HIDDEN": shape.hidden,
        "ROWS": bulk_q3_k.ROWS,
        "SLICES": how.plan.slices,
        "BEGIN": how.begin(),
        "ROW": how.token_row(),
        "PRODUCTS": how.products(),
        "RESULT": how.result(),
        "BF16": bf16,
        "WARPS": bulk_q3_k.N_WARPS,
    }
