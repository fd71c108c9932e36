"""The routed experts of one token over fp4 weights or GGUF blocks, wherever their slots lie.

Invariants: every picked expert reads the one quantised row; an expert's gate, up and down come from
addresses, so slots may lie in several tiers; an address of 0 marks an absent expert, of which
nothing is read. Sums over experts run in plan order in f32. Products are exact whole numbers
(`fp4_words.py`, `block_words.py`); only the sums over groups of 32 round. Kernels for fp4 are here,
those for blocks in `routed_m1_blocks.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .byte_planes import byte_planes
from .device import runs_kernels, speaks_ptx
from .formats.fp4_expert import Fp4Shape
from .formats.k_expert import BlockShape
from .fp4_words import plain_word_dot
from .reference import routed_m1 as reference
from .routed_m1_blocks import check_blocks, launch_blocks
from .routed_m1_buffers import RoutedBuffers
from .routed_m1_swiglu import gated, rounded
from .sum_parts import sum_parts
from .tensor_checks import check_contiguous, check_tensor


@triton.jit
def _scale_bits(code):
    # 2^(code - 127); code 0 is subnormal and a shift alone would lose it.
    code = code.to(tl.int32)
    return tl.where(code == 0, 0x00400000, code << 23).to(tl.float32, bitcast=True)


@triton.jit
def _plain_rows(
    matrix, matrix_scales, planes, offsets, scales, rows, GROUPS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return [len(rows)] f32: rows of an fp4 matrix times one row of byte planes."""
    total = tl.zeros([rows.shape[0], BLOCK], tl.float32)
    for start in range(0, GROUPS, BLOCK):
        group = start + tl.arange(0, BLOCK)
        at = group[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
        inside = (group < GROUPS)[None, :]
        within = inside[:, :, None]
        word = tl.load(matrix + rows[:, None, None] * GROUPS * 4 + at, mask=within, other=0)
        stride: tl.constexpr = GROUPS * 4
        p0 = tl.load(planes + at, mask=within, other=0)
        p1 = tl.load(planes + stride + at, mask=within, other=0)
        p2 = tl.load(planes + 2 * stride + at, mask=within, other=0)
        p3 = tl.load(planes + 3 * stride + at, mask=within, other=0)
        p4 = tl.load(planes + 4 * stride + at, mask=within, other=0)
        p5 = tl.load(planes + 5 * stride + at, mask=within, other=0)
        whole = tl.sum(plain_word_dot(word, p0, p1, p2, p3, p4, p5), 2)
        whole += tl.load(offsets + group, mask=group < GROUPS, other=0)[None, :]
        code = tl.load(
            matrix_scales + rows[:, None] * GROUPS + group[None, :], mask=inside, other=0
        )
        scale = tl.load(scales + group, mask=group < GROUPS, other=0.0)[None, :]
        total += whole.to(tl.float32) * (_scale_bits(code) * scale)
    return tl.sum(total, 1)


@triton.jit
def _gate_up_kernel(
    pointers,
    weights,
    planes,
    offsets,
    scales,
    activated,
    n_experts,
    limit,
    GATE_SCALE: tl.constexpr,
    UP_SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BF16: tl.constexpr,
):
    expert = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    gate_at, up_at = tl.load(pointers + expert), tl.load(pointers + n_experts + expert)
    if gate_at == 0:
        tl.store(activated + expert * WIDTH + rows, tl.zeros([ROWS], tl.float32))
        return
    gate = _plain_rows(
        gate_at.to(tl.pointer_type(tl.int32)),
        (gate_at + GATE_SCALE).to(tl.pointer_type(tl.uint8)),
        planes, offsets, scales, rows, GROUPS, BLOCK,
    )  # fmt: skip
    up = _plain_rows(
        up_at.to(tl.pointer_type(tl.int32)),
        (up_at + UP_SCALE).to(tl.pointer_type(tl.uint8)),
        planes, offsets, scales, rows, GROUPS, BLOCK,
    )  # fmt: skip
    value = gated(gate, up, tl.load(weights + expert), limit, BF16)
    tl.store(activated + expert * WIDTH + rows, value)


@triton.jit
def _down_kernel(
    pointers,
    planes,
    offsets,
    scales,
    out,
    n_experts,
    DOWN_SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BF16: tl.constexpr,
):
    expert = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.load(pointers + 2 * n_experts + expert)
    if at == 0:
        return
    y = _plain_rows(
        at.to(tl.pointer_type(tl.int32)),
        (at + DOWN_SCALE).to(tl.pointer_type(tl.uint8)),
        planes + expert * GROUPS * 24,
        offsets + expert * GROUPS,
        scales + expert * GROUPS,
        rows, GROUPS, BLOCK,
    )  # fmt: skip
    tl.store(out + expert * HIDDEN + rows, rounded(y, BF16))


def routed_m1(
    x: Tensor,
    pointers: Tensor,
    weights: Tensor,
    shape: Fp4Shape | BlockShape,
    limit: float,
    *,
    dtype: torch.dtype = torch.bfloat16,
    plain: bool = False,
    buffers: RoutedBuffers | None = None,
    out: Tensor | None = None,
    sums: bool = True,
    row_given: bool = False,
) -> Tensor:
    """Sum one token's experts in plan order: sum over e of w2(weight * act(w1 x, w3 x)).

    x         [1, hidden] bf16 or f32
    pointers  [3, K] i64 addresses of gate, up and down, experts in plan order; an expert whose
              three are 0 is absent: it adds nothing
    weights   [K] f32 routing weights in plan order, contiguous
    shape     sizes, and where scales lie or which block formats the matrices have
    dtype     what each product is rounded to: bf16 or f32
    plain     takes the bodies without inline PTX on a GPU too, for comparison
    buffers   scratch for K experts or more, then nothing is allocated
    sums      False: the experts' outputs are not added, where kernels run
    row_given  the buffers' row is x rounded already (fp4 experts)
    returns   [hidden] f32, in `out` or else in the buffers' where given; without `sums` the
              buffers' parts [K, hidden] f32, where the row of an absent expert is undefined

    A row is rounded before each product: to fp8 for fp4 weights, to q8_1 for blocks. Addresses are
    multiples of 16, pieces followed by two bytes at least where their length is no multiple of 4.
    Raises ValueError on a shape, dtype or stride that differs. Each product is within 2e-6
    (relative, f32) of the reference's; what lies near a tie of the inner row's rounding moves by a
    step of that, so the whole is within 2e-3 (relative to the row's norm) of `reference.routed_m1`,
    3e-3 for blocks. Source: model specification, section 3.7.
    """
    _check(x, pointers, weights, shape)
    n_experts = weights.shape[0]
    scratch = RoutedBuffers.new(shape, n_experts, x.device) if buffers is None else buffers
    out = scratch.out if out is None else out
    _check_buffers(scratch, out, n_experts, shape)
    if not runs_kernels(x):
        return out.copy_(reference.routed_m1(x, pointers, weights, shape, limit, dtype))
    scratch = scratch.first(n_experts)
    if isinstance(shape, Fp4Shape) and not row_given:
        planes, offsets, scales = scratch.row
        byte_planes(x, out=(planes, offsets, scales))
    if isinstance(shape, BlockShape):
        launch_blocks(x, pointers, weights, scratch, shape, limit, dtype, plain=plain)
    elif speaks_ptx(x.device) and not plain:
        from .routed_m1_layouts import launch_layouts  # noqa: PLC0415  wants a GPU's compiler

        launch_layouts(pointers, weights, scratch, shape, limit, dtype)
    else:
        _launch_plain(pointers, weights, scratch, shape, limit, dtype)
    if not sums:
        return scratch.parts
    sum_parts(scratch.parts, None, dtype=torch.float32, present=pointers[2], out=out.view(1, -1))
    return out


def _launch_plain(
    pointers: Tensor,
    weights: Tensor,
    scratch: RoutedBuffers,
    shape: Fp4Shape,
    limit: float,
    dtype: torch.dtype,
) -> None:
    """Fill `scratch.parts` with each expert's output."""
    n_experts = weights.shape[0]
    options: dict[str, Any] = {"ROWS": 32, "BLOCK": 8, "num_warps": 4}
    options["BF16"] = dtype == torch.bfloat16
    _gate_up_kernel[(shape.width // 32, n_experts)](
        pointers, weights, *scratch.row, scratch.activated, n_experts, limit,
        GATE_SCALE=shape.gate_scale, UP_SCALE=shape.up_scale, GROUPS=shape.hidden // 32,
        WIDTH=shape.width, **options,
    )  # fmt: skip
    planes, offsets, scales = scratch.activated_row
    rows = byte_planes(scratch.activated, out=(planes, offsets, scales))
    _down_kernel[(shape.hidden // 32, n_experts)](
        pointers, *rows, scratch.parts, n_experts,
        DOWN_SCALE=shape.down_scale, GROUPS=shape.width // 32, HIDDEN=shape.hidden, **options,
    )  # fmt: skip


def _check(x: Tensor, pointers: Tensor, weights: Tensor, shape: Fp4Shape | BlockShape) -> None:
    if isinstance(shape, BlockShape):
        check_blocks(shape)
    if tuple(x.shape) != (1, shape.hidden):
        raise ValueError(f"routed_m1: x is {tuple(x.shape)}, wanted {(1, shape.hidden)}")
    if shape.hidden % 32 or shape.width % 32:
        raise ValueError(f"routed_m1: {shape.hidden} x {shape.width} are no multiples of 32")
    if pointers.dtype != torch.int64 or tuple(pointers.shape) != (3, weights.shape[0]):
        raise ValueError(
            f"routed_m1: pointers are {pointers.dtype} {tuple(pointers.shape)}, "
            f"wanted int64 {(3, weights.shape[0])}"
        )
    check_contiguous("routed_m1", pointers=pointers)
    check_tensor("routed_m1", "weights", weights, (weights.shape[0],), torch.float32)


def _check_buffers(
    scratch: RoutedBuffers, out: Tensor, n_experts: int, shape: Fp4Shape | BlockShape
) -> None:
    held, width = scratch.activated.shape
    if held < n_experts or width != shape.width or scratch.parts.shape[1] != shape.hidden:
        raise ValueError(
            f"routed_m1: buffers are for {held} experts of width {width}, "
            f"wanted {n_experts} of {shape.width}"
        )
    for part in (*scratch.row, scratch.activated, *scratch.activated_row, scratch.parts):
        check_contiguous("routed_m1", buffers=part)
    check_tensor("routed_m1", "out", out, (shape.hidden,), torch.float32)
