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

from .early_launch import early
from .early_launch_layouts import join_previous
from .formats.fp4_expert import Fp4Shape
from .fp4_words import GROUP_ASSEMBLY, GROUP_CONSTRAINTS
from .gated_groups import bf16_bits, gated_sums
from .routed_m1_buffers import RoutedBuffers

_ROWS_A_LANE = 4
_REGISTERS = 128  # measured: with more, too few warps hide the memory; with fewer, values spill
_ASSEMBLY = gl.constexpr(GROUP_ASSEMBLY.value)
_CONSTRAINTS = gl.constexpr(GROUP_CONSTRAINTS.value)


@gluon.jit
def _scale_bits(code):
    code = code.to(gl.int32)
    return gl.where(code == 0, 0x00400000, code << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _load_planes(planes, STRIDE: gl.constexpr, START: gl.constexpr):
    p0 = gl.load(planes + START)
    p1 = gl.load(planes + (STRIDE + START))
    p2 = gl.load(planes + (2 * STRIDE + START))
    p3 = gl.load(planes + (3 * STRIDE + START))
    p4 = gl.load(planes + (4 * STRIDE + START))
    p5 = gl.load(planes + (5 * STRIDE + START))
    return p0, p1, p2, p3, p4, p5


@gluon.jit
def _group_sums(words, codes, p0, p1, p2, p3, p4, p5, offset, scale):
    """Return [rows, groups] f32: each group of each row times its part of the planes."""
    sums = gl.inline_asm_elementwise(
        _ASSEMBLY, _CONSTRAINTS, [gl.load(words), p0, p1, p2, p3, p4, p5],
        dtype=gl.int32, is_pure=True, pack=4,
    )  # fmt: skip
    whole = gl.sum(sums, 2) + offset
    return whole.to(gl.float32) * (_scale_bits(gl.load(codes)) * scale)


@gluon.jit
def _matrix_at(
    at, scales_at, first, GROUPS: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr
):
    """Return pointers [ROWS, BLOCK, 4] to words and [ROWS, BLOCK] to scales, at step 0."""
    by_group: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, by_group)).to(gl.int64)
    row = gl.expand_dims(row, 1)
    skip = first.to(gl.int64) * GROUPS
    # Without the promise of alignment the compiler loads word by word.
    words = gl.multiple_of((at + skip * 16).to(gl.pointer_type(gl.int32), bitcast=True), 16)
    codes = (scales_at + skip).to(gl.pointer_type(gl.uint8), bitcast=True)
    return words + gl.expand_dims(row, 2) * (GROUPS * 4), codes + row * GROUPS


@gluon.jit
def _group_numbers(BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the group [1, BLOCK] and the word [1, BLOCK, 4] of each place in a step."""
    by_group: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    group = gl.expand_dims(gl.arange(0, BLOCK, layout=gl.SliceLayout(0, by_group)), 0)
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    return group, gl.expand_dims(group, 2) * 4 + gl.expand_dims(gl.expand_dims(word, 0), 0)


@gluon.jit
def _store_planes(
    v, planes, offsets, scales, expert, group, GROUPS: gl.constexpr, WARPS: gl.constexpr
):
    """Round one group v [32] to fp8 and store its byte planes, as `byte_planes` does."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    square: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    v = gl.convert_layout(v, line)
    largest = gl.max(v.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    is_finite = largest < 0x7F800000
    v = gl.where(is_finite, v, 0.0)
    amax = gl.where(is_finite, largest, 0).to(gl.float32, bitcast=True)
    amax = gl.maximum(amax, 1e-4) * 0.0022321429569274187
    bits = (amax.to(gl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000
    inverse = (0x7F000000 - bits).to(gl.float32, bitcast=True)
    scaled = gl.minimum(gl.maximum(v * inverse, -448.0), 448.0)
    binade = (scaled.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
    magic = gl.maximum(binade, 0.015625) * 1572864.0
    whole = (((scaled + magic) - magic) * 512.0).to(gl.int32)
    whole = gl.convert_layout(gl.reshape(whole, [8, 4]), square)
    byte = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, square)), 0)
    half = gl.arange(0, 8, layout=gl.SliceLayout(1, square))
    out = planes + (expert * GROUPS * 24 + group * 4) + (half % 2) * (GROUPS * 4) + half // 2
    for plane in gl.static_range(3):
        packed = gl.sum(((whole >> (8 * plane)) & 255) << (8 * byte), 1)
        gl.store(out + plane * GROUPS * 8, packed)
    gl.store(offsets + expert * GROUPS + group, gl.sum(gl.sum(whole, 1), 0) * -192)
    scale = (bits.to(gl.float32, bitcast=True) * (1.0 / 1024.0)).to(gl.int32, bitcast=True)
    scale = gl.where(is_finite, scale, 0x7FC00000).to(gl.float32, bitcast=True)
    gl.store(scales + expert * GROUPS + group, scale)


@gluon.jit
def _gate_up_kernel(
    pointers, weights, planes, offsets, scales, out_planes, out_offsets, out_scales,
    n_experts, limit,
    GATE_SCALE: gl.constexpr, UP_SCALE: gl.constexpr, GROUPS: gl.constexpr,
    WIDTH_GROUPS: gl.constexpr, BLOCK: gl.constexpr, LAYOUT: gl.constexpr, BF16: gl.constexpr,
    WARPS: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    join_previous(EARLY)
    expert = gl.program_id(1)
    first = gl.program_id(0) * 32
    by_group: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    group, word = _group_numbers(BLOCK, LAYOUT)
    gate_at, up_at = gl.load(pointers + expert), gl.load(pointers + n_experts + expert)
    if gate_at == 0:
        return
    gate_words, gate_codes = _matrix_at(gate_at, gate_at + GATE_SCALE, first, GROUPS, 32, LAYOUT)
    up_words, up_codes = _matrix_at(up_at, up_at + UP_SCALE, first, GROUPS, 32, LAYOUT)
    gate = gl.zeros([32, BLOCK], gl.float32, by_group)
    up = gl.zeros([32, BLOCK], gl.float32, by_group)
    for step in gl.static_range(GROUPS // BLOCK):
        p0, p1, p2, p3, p4, p5 = _load_planes(planes + word, GROUPS * 4, step * BLOCK * 4)
        offset = gl.load(offsets + group + step * BLOCK)
        scale = gl.load(scales + group + step * BLOCK)
        gate += _group_sums(
            gate_words + (word + step * BLOCK * 4), gate_codes + (group + step * BLOCK),
            p0, p1, p2, p3, p4, p5, offset, scale,
        )  # fmt: skip
        up += _group_sums(
            up_words + (word + step * BLOCK * 4), up_codes + (group + step * BLOCK),
            p0, p1, p2, p3, p4, p5, offset, scale,
        )  # fmt: skip
    weight = gl.load(weights + expert)
    value = gated_sums(gl.sum(gate, 1), gl.sum(up, 1), weight, limit, BF16)
    _store_planes(
        value, out_planes, out_offsets, out_scales, expert, gl.program_id(0), WIDTH_GROUPS, WARPS
    )


@gluon.jit
def _down_kernel(
    pointers, planes, offsets, scales, out, n_experts,
    DOWN_SCALE: gl.constexpr, GROUPS: gl.constexpr, HIDDEN: gl.constexpr, ROWS: gl.constexpr,
    BLOCK: gl.constexpr, LAYOUT: gl.constexpr, BF16: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    join_previous(EARLY)
    expert = gl.program_id(1)
    first = gl.program_id(0) * ROWS
    by_group: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    group, word = _group_numbers(BLOCK, LAYOUT)
    at = gl.load(pointers + 2 * n_experts + expert)
    if at == 0:
        return
    words, codes = _matrix_at(at, at + DOWN_SCALE, first, GROUPS, ROWS, LAYOUT)
    planes += expert * (GROUPS * 24)
    offsets += expert * GROUPS
    scales += expert * GROUPS
    total = gl.zeros([ROWS, BLOCK], gl.float32, by_group)
    for step in gl.static_range(GROUPS // BLOCK):
        p0, p1, p2, p3, p4, p5 = _load_planes(planes + word, GROUPS * 4, step * BLOCK * 4)
        offset = gl.load(offsets + group + step * BLOCK)
        scale = gl.load(scales + group + step * BLOCK)
        total += _group_sums(
            words + (word + step * BLOCK * 4), codes + (group + step * BLOCK),
            p0, p1, p2, p3, p4, p5, offset, scale,
        )  # fmt: skip
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, by_group))
    gl.store(out + expert * HIDDEN + first + row, bf16_bits(gl.sum(total, 1), BF16))


def launch_layouts(
    pointers: Tensor,
    weights: Tensor,
    scratch: RoutedBuffers,
    shape: Fp4Shape,
    limit: float,
    dtype: torch.dtype,
) -> None:
    """Fill `scratch.parts` with each expert's output."""
    n_experts, bf16 = weights.shape[0], dtype == torch.bfloat16
    groups, width_groups = shape.hidden // 32, shape.width // 32
    # 32 rows a program: a whole group of the down projection's input.
    _, block, layout, warps = tiling(groups, 32, rows=32)
    _gate_up_kernel[(width_groups, n_experts)](
        pointers, weights, *scratch.row, *scratch.activated_row, n_experts, limit,
        GATE_SCALE=shape.gate_scale, UP_SCALE=shape.up_scale, GROUPS=groups,
        WIDTH_GROUPS=width_groups, BLOCK=block, LAYOUT=layout, BF16=bf16, WARPS=warps,
        num_warps=warps, maxnreg=_REGISTERS, **early(pointers.device),
    )  # fmt: skip
    rows, block, layout, warps = tiling(width_groups, shape.hidden)
    _down_kernel[(shape.hidden // rows, n_experts)](
        pointers, *scratch.activated_row, scratch.parts, n_experts,
        DOWN_SCALE=shape.down_scale, GROUPS=width_groups, HIDDEN=shape.hidden, ROWS=rows,
        BLOCK=block, LAYOUT=layout, BF16=bf16, num_warps=warps, maxnreg=_REGISTERS,
        **early(pointers.device),
    )  # fmt: skip


def tiling(
    groups: int, n_rows: int, rows: int | None = None
) -> tuple[int, int, gl.BlockedLayout, int]:
    """Return rows a program, groups a step, the layout of [rows, groups, 4 words], and warps.

    Lanes lie along the groups as far as their number divides, the others along rows. `rows` asks
    for that many rows in a program, with as many warps as they fill.
    """
    lanes = min(32, groups & -groups)
    rows_a_lane = _ROWS_A_LANE
    while n_rows % (32 // lanes * rows_a_lane):
        rows_a_lane //= 2
    rows_a_warp = 32 // lanes * rows_a_lane
    warps = 1 if rows is None else rows // rows_a_warp
    layout = gl.BlockedLayout(
        [rows_a_lane, 1, 4], [32 // lanes, lanes, 1], [warps, 1, 1], [2, 1, 0]
    )
    return rows_a_warp * warps, lanes, layout, warps
