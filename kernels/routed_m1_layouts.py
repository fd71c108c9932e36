"""The routed experts of one token with explicit layouts and inline PTX, for NVIDIA GPUs.

A lane owns whole groups of 32 codes of a few rows, so that a group's sum stays in the lane, each
load is 16 bytes, and the planes of the row are loaded once for all of the lane's matrix rows. The
loops are unrolled: the compiler then issues loads far ahead. Bits of the whole-number sums equal
those of the plain bodies; the order of the f32 sums over groups differs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .formats.fp4_expert import Fp4Shape
from .fp4_words import GROUP_ASSEMBLY, GROUP_CONSTRAINTS

_ROWS_A_LANE = 4
_REGISTERS = 128  # measured: with more, too few warps hide the memory; with fewer, values spill
_ASSEMBLY = gl.constexpr(GROUP_ASSEMBLY.value)
_CONSTRAINTS = gl.constexpr(GROUP_CONSTRAINTS.value)


@gluon.jit
def _bf16_bits(v, BF16: gl.constexpr):
    if BF16:
        bits = v.to(gl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        v = bits.to(gl.float32, bitcast=True)
    return v


@gluon.jit
def _group_dots(word, planes, STRIDE: gl.constexpr, START: gl.constexpr):
    p0 = gl.load(planes + START)
    p1 = gl.load(planes + (STRIDE + START))
    p2 = gl.load(planes + (2 * STRIDE + START))
    p3 = gl.load(planes + (3 * STRIDE + START))
    p4 = gl.load(planes + (4 * STRIDE + START))
    p5 = gl.load(planes + (5 * STRIDE + START))
    sums = gl.inline_asm_elementwise(
        _ASSEMBLY, _CONSTRAINTS, [word, p0, p1, p2, p3, p4, p5],
        dtype=gl.int32, is_pure=True, pack=4,
    )  # fmt: skip
    return gl.sum(sums, 2)


@gluon.jit
def _scale_bits(code):
    code = code.to(gl.int32)
    return gl.where(code == 0, 0x00400000, code << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _rows(
    matrix,  # i64 address of the first row
    matrix_scales,
    planes,
    offsets,
    scales,
    GROUPS: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Return [ROWS] f32 in the slice of LAYOUT that holds rows."""
    by_group: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, by_group)).to(gl.int64)
    row = gl.expand_dims(row, 1)
    group = gl.expand_dims(gl.arange(0, BLOCK, layout=gl.SliceLayout(0, by_group)), 0)
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    word = gl.expand_dims(gl.expand_dims(word, 0), 0)
    at = gl.expand_dims(group, 2) * 4 + word
    # Without the promise of alignment the compiler loads word by word.
    words = gl.multiple_of(matrix.to(gl.pointer_type(gl.int32), bitcast=True), 16) + at
    codes = matrix_scales.to(gl.pointer_type(gl.uint8), bitcast=True) + group
    word_rows = gl.expand_dims(row, 2) * (GROUPS * 4)
    code_rows = row * GROUPS
    planes = planes + at
    offsets = offsets + group
    scales = scales + group
    total = gl.zeros([ROWS, BLOCK], gl.float32, by_group)
    for step in gl.static_range(GROUPS // BLOCK):
        packed = gl.load(words + (word_rows + step * BLOCK * 4))
        code = gl.load(codes + (code_rows + step * BLOCK))
        whole = _group_dots(packed, planes, GROUPS * 4, step * BLOCK * 4)
        whole += gl.load(offsets + step * BLOCK)
        scale = _scale_bits(code) * gl.load(scales + step * BLOCK)
        total += whole.to(gl.float32) * scale
    return gl.sum(total, 1)


@gluon.jit
def _gate_up_kernel(
    pointers,
    weights,
    planes,
    offsets,
    scales,
    activated,
    n_experts,
    limit,
    GATE_SCALE: gl.constexpr,
    UP_SCALE: gl.constexpr,
    GROUPS: gl.constexpr,
    WIDTH: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK: gl.constexpr,
    LAYOUT: gl.constexpr,
    BF16: gl.constexpr,
):
    expert = gl.program_id(1)
    first = gl.program_id(0) * ROWS
    gate_at = gl.load(pointers + expert)
    up_at = gl.load(pointers + n_experts + expert)
    skip = first.to(gl.int64) * (GROUPS * 16)
    skip_scales = first.to(gl.int64) * GROUPS
    gate = _rows(
        gate_at + skip, gate_at + GATE_SCALE + skip_scales,
        planes, offsets, scales, GROUPS, ROWS, BLOCK, LAYOUT,
    )  # fmt: skip
    up = _rows(
        up_at + skip, up_at + UP_SCALE + skip_scales,
        planes, offsets, scales, GROUPS, ROWS, BLOCK, LAYOUT,
    )  # fmt: skip
    gate = gl.minimum(_bf16_bits(gate, BF16), limit)
    up = gl.minimum(gl.maximum(_bf16_bits(up, BF16), -limit), limit)
    # exp of a negative number never overflows; the sigmoid of the two signs are complements.
    small = gl.exp(-gl.abs(gate))
    sigmoid = gl.where(gate < 0.0, small, 1.0) / (1.0 + small)
    value = gate * sigmoid * up * gl.load(weights + expert)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    gl.store(activated + expert * WIDTH + first + row, _bf16_bits(value, BF16))


@gluon.jit
def _down_kernel(
    pointers,
    planes,
    offsets,
    scales,
    out,
    n_experts,
    DOWN_SCALE: gl.constexpr,
    GROUPS: gl.constexpr,
    HIDDEN: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK: gl.constexpr,
    LAYOUT: gl.constexpr,
    BF16: gl.constexpr,
):
    expert = gl.program_id(1)
    first = gl.program_id(0) * ROWS
    at = gl.load(pointers + 2 * n_experts + expert)
    y = _rows(
        at + first.to(gl.int64) * (GROUPS * 16),
        at + DOWN_SCALE + first.to(gl.int64) * GROUPS,
        planes + expert * (GROUPS * 24), offsets + expert * GROUPS, scales + expert * GROUPS,
        GROUPS, ROWS, BLOCK, LAYOUT,
    )  # fmt: skip
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    gl.store(out + expert * HIDDEN + first + row, _bf16_bits(y, BF16))


def launch_layouts(
    pointers: Tensor,
    weights: Tensor,
    row: tuple[Tensor, Tensor, Tensor],
    activated: Tensor | None,
    parts: Tensor | None,
    shape: Fp4Shape,
    limit: float,
    dtype: torch.dtype,
) -> None:
    """Run gate and up into `activated`, or down into `parts`, whichever is given."""
    n_experts = weights.shape[0]
    bf16 = dtype == torch.bfloat16
    if activated is not None:
        groups = shape.hidden // 32
        rows, block, layout, warps = tiling(groups, shape.width)
        _gate_up_kernel[(shape.width // rows, n_experts)](
            pointers, weights, *row, activated, n_experts, limit,
            GATE_SCALE=shape.gate_scale, UP_SCALE=shape.up_scale, GROUPS=groups,
            WIDTH=shape.width, ROWS=rows, BLOCK=block, LAYOUT=layout, BF16=bf16,
            num_warps=warps, maxnreg=_REGISTERS,
        )  # fmt: skip
    if parts is not None:
        groups = shape.width // 32
        rows, block, layout, warps = tiling(groups, shape.hidden)
        _down_kernel[(shape.hidden // rows, n_experts)](
            pointers, *row, parts, n_experts,
            DOWN_SCALE=shape.down_scale, GROUPS=groups, HIDDEN=shape.hidden, ROWS=rows,
            BLOCK=block, LAYOUT=layout, BF16=bf16, num_warps=warps, maxnreg=_REGISTERS,
        )  # fmt: skip


def tiling(groups: int, n_rows: int) -> tuple[int, int, gl.BlockedLayout, int]:
    """Return rows a program, groups a step, the layout of [rows, groups, 4 words], and warps.

    Lanes lie along the groups as far as their number divides, the others along rows.
    """
    lanes = min(32, groups & -groups)
    rows_a_lane = _ROWS_A_LANE
    while n_rows % (32 // lanes * rows_a_lane):
        rows_a_lane //= 2
    rows = 32 // lanes * rows_a_lane
    layout = gl.BlockedLayout([rows_a_lane, 1, 4], [32 // lanes, lanes, 1], [1, 1, 1], [2, 1, 0])
    return rows, lanes, layout, 1
