"""The routed experts of many rows on Hopper's tensor cores, fp4 dequantised in registers.

The matrix is the left operand, so that its values go from words to tensor cores without leaving
their lane, and pairs of token and expert are the columns: a few of them cost little. A lane's 16
bytes of a row are the 32 codes of one group under one scale; which product they meet is a matter of
order alone, and the prepared rows have that order (`prepared_rows`). Two matrices share a stage of
columns: gate and up, or two blocks of down's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .formats.fp4_expert import Fp4Shape
from .fp4_to_bf16 import CODE_ASSEMBLY, CODE_CONSTRAINTS, LARGEST, SCALE_OFFSET, SMALLEST
from .gated_groups import or_nan
from .prepared_rows import prepared_rows
from .reference.prepared_rows import BLOCK
from .routed_rows import device_tiles

# Names that differ between the versions of Triton that are supported.
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

PAIRS = (16, 32, 64, 128)  # columns of a tile: a group's rest takes the smallest that holds it
# As measured on an H200: 4 warps for the sizes of most groups, 8 for the largest tile.
STAGES = {16: 4, 32: 3, 64: 2, 128: 4}
WARPS = {16: 8, 32: 4, 64: 4, 128: 8}  # 4 or 8: more share columns, fewer programs fit
REGISTERS = {16: 96, 32: 120, 64: 128, 128: 255}  # nothing spills: two programs fit, or one

_STEP = gl.constexpr(BLOCK)
_COLUMNS_AT_REST = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_WORDS_AT_REST = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


def words_layout(warps: int) -> gl.DistributedLinearLayout:
    """Return the layout of words [16 * warps, 4, 4]: a lane has a group's four, of two rows."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [8, 0, 0]],
        lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16 << bit, 0, 0] for bit in range(warps.bit_length() - 1)],
        block_bases=[],
        shape=[16 * warps, 4, 4],
    )


_ASSEMBLY = gl.constexpr(CODE_ASSEMBLY.value)
_CONSTRAINTS = gl.constexpr(CODE_CONSTRAINTS.value)
_KINDS = gl.constexpr((gl.bfloat16,) * 8)


@gluon.jit
def _values(words, codes, ROWS: gl.constexpr, OPERAND: gl.constexpr):
    """Return [ROWS, 128] bf16 of words [ROWS, 4, 4] i32 and E8M0 codes [ROWS, 4], reordered."""
    code = codes.to(gl.int32)
    # 255 is no number and has no nearest one: it becomes an infinity, whose sums are none either.
    code = gl.minimum(gl.maximum(code, SMALLEST), LARGEST) + SCALE_OFFSET + ((code + 1) >> 8)
    factor = (code << 7) | (code << 23)
    factors, words = gl.broadcast(gl.expand_dims(factor, 2), words)
    v0, v1, v2, v3, v4, v5, v6, v7 = gl.inline_asm_elementwise(
        _ASSEMBLY, _CONSTRAINTS, [words, factors], dtype=_KINDS, is_pure=True, pack=4
    )
    low = gl.join(gl.join(v0, v1), gl.join(v2, v3))
    high = gl.join(gl.join(v4, v5), gl.join(v6, v7))
    values = gl.reshape(gl.join(low, high), [ROWS, 4, 2, 2, 2, 2, 2])
    values = gl.permute(values, [0, 6, 5, 4, 2, 1, 3])
    return gl.convert_layout(gl.reshape(values, [ROWS, 128]), OPERAND, assert_trivial=True)


@gluon.jit
def _matrix_at(
    at, scales_at, first_row, GROUPS: gl.constexpr, N: gl.constexpr, WORDS: gl.constexpr
):
    """Return pointers [rows, 4, 4] to the words of a step and [rows, 4] to its scales, at step 0.

    Rows beyond the matrix's N are its last one.
    """
    by_group: gl.constexpr = gl.SliceLayout(2, WORDS)
    row = gl.arange(0, WORDS.shape[0], layout=gl.SliceLayout(1, by_group))
    if N % WORDS.shape[0]:
        row = gl.minimum(row, N - 1 - first_row)
    skip = first_row.to(gl.int64) * GROUPS
    group = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, by_group)), 0)
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, WORDS)))
    word = gl.expand_dims(gl.expand_dims(word, 0), 0)
    row = gl.expand_dims(row, 1)
    within = gl.expand_dims(row * (GROUPS * 4) + group * 4, 2) + word
    # Without the promise of alignment the compiler copies word by word.
    words = gl.multiple_of((at + skip * 16).to(gl.pointer_type(gl.int32), bitcast=True), 16)
    codes = (scales_at + skip).to(gl.pointer_type(gl.uint8), bitcast=True)
    return words + within, codes + (row * GROUPS + group)


@gluon.jit
def _issue(
    first_words, second_words, columns, stage, step, first_at, second_at, x_at, inside,
    GROUPS: gl.constexpr, STEPS: gl.constexpr, WORDS: gl.constexpr,
):  # fmt: skip
    """Start the copies of one step."""
    within = step < STEPS
    if GROUPS % 4:
        group = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, WORDS))) + step * 4
        within = gl.expand_dims(gl.expand_dims(group < GROUPS, 0), 2)
    _copy(first_words.index(stage), first_at + step * 16, mask=within)
    _copy(second_words.index(stage), second_at + step * 16, mask=within)
    _copy(columns.index(stage), x_at + step * _STEP, mask=inside & (step < STEPS))
    async_copy.commit_group()


@gluon.jit
def _scales(codes, step, GROUPS: gl.constexpr, WORDS: gl.constexpr):
    """Return the scales [rows, 4] u8 of a step, or anything beyond the last."""
    if GROUPS % 4:
        group = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, WORDS))) + step * 4
        return gl.load(codes + step * 4, mask=gl.expand_dims(group < GROUPS, 0), other=0)
    return gl.load(codes + gl.minimum(step * 4, GROUPS - 4))


@gluon.jit
def _products(
    first_at, first_codes, second_at, second_codes, x_at, inside,
    GROUPS: gl.constexpr, PAIRS: gl.constexpr, STAGES: gl.constexpr, WORDS: gl.constexpr,
):  # fmt: skip
    """Return two [rows, PAIRS] f32: rows of two matrices times the prepared rows of a tile."""
    rows: gl.constexpr = WORDS.shape[0]
    result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [rows // 16, 1], [16, PAIRS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, result, 2)
    steps: gl.constexpr = (GROUPS + 3) // 4
    first_words = gl.allocate_shared_memory(gl.int32, [STAGES, rows, 4, 4], _WORDS_AT_REST)
    second_words = gl.allocate_shared_memory(gl.int32, [STAGES, rows, 4, 4], _WORDS_AT_REST)
    columns = gl.allocate_shared_memory(gl.bfloat16, [STAGES, PAIRS, _STEP], _COLUMNS_AT_REST)
    for stage in gl.static_range(STAGES - 1):
        _issue(
            first_words, second_words, columns, stage, stage, first_at, second_at, x_at, inside,
            GROUPS, steps, WORDS,
        )  # fmt: skip
    first_now = _scales(first_codes, 0, GROUPS, WORDS)
    second_now = _scales(second_codes, 0, GROUPS, WORDS)
    first_next = _scales(first_codes, 1, GROUPS, WORDS)
    second_next = _scales(second_codes, 1, GROUPS, WORDS)
    first = gl.zeros([rows, PAIRS], gl.float32, layout=result)
    second = gl.zeros([rows, PAIRS], gl.float32, layout=result)
    stage = 0
    free = STAGES - 1
    for step in range(steps):
        async_copy.wait_group(STAGES - 2)  # the compiler adds a barrier
        fence_async_shared()
        # All warps are done with the stage of the step before: it is the free one.
        _issue(
            first_words, second_words, columns, free, step + STAGES - 1, first_at, second_at, x_at,
            inside, GROUPS, steps, WORDS,
        )  # fmt: skip
        first_after = _scales(first_codes, step + 2, GROUPS, WORDS)
        second_after = _scales(second_codes, step + 2, GROUPS, WORDS)
        right = columns.index(stage).permute((1, 0))
        left = _values(first_words.index(stage).load(WORDS), first_now, rows, operand)
        first = warpgroup_mma(left, right, first, is_async=True)
        left = _values(second_words.index(stage).load(WORDS), second_now, rows, operand)
        second = warpgroup_mma(left, right, second, is_async=True)
        first, second = warpgroup_mma_wait(0, deps=[first, second])
        first_now, second_now = first_next, second_next
        first_next, second_next = first_after, second_after
        free = stage
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    async_copy.wait_group(0)
    return first, second


@gluon.jit
def _columns_at(x, start, count, PAIRS: gl.constexpr, STRIDE: gl.constexpr, WORDS: gl.constexpr):
    """Return pointers [PAIRS, 128] to a tile's rows, at step 0, and which of them it has."""
    warps: gl.constexpr = WORDS.shape[0] // 16
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [warps, 1], [1, 0])
    channel = gl.expand_dims(gl.arange(0, _STEP, layout=gl.SliceLayout(0, layout)), 0)
    pair = gl.expand_dims(gl.arange(0, PAIRS, layout=gl.SliceLayout(1, layout)), 1)
    return x + start.to(gl.int64) * STRIDE + (pair * STRIDE + channel), pair < count


# Parts of tensors come, at any place: each alignment would be compiled anew.
@gluon.jit(do_not_specialize=["n_groups"], do_not_specialize_on_alignment=["tiles", "weights"])
def _rows_gate_up_kernel(
    x, weights, tiles, pointers, activated, n_groups, limit,
    GATE_SCALE: gl.constexpr, UP_SCALE: gl.constexpr, GROUPS: gl.constexpr,
    WIDTH: gl.constexpr, PAIRS: gl.constexpr, STAGES: gl.constexpr, WORDS: gl.constexpr,
):  # fmt: skip
    rows: gl.constexpr = WORDS.shape[0]
    tile = tiles + gl.program_id(1) * 3
    group, start, count = gl.load(tile), gl.load(tile + 1), gl.load(tile + 2)
    gate_at, up_at = gl.load(pointers + group), gl.load(pointers + n_groups + group)
    if gate_at == 0:
        return
    first_row = gl.program_id(0) * rows
    x_at, inside = _columns_at(x, start, count, PAIRS, (GROUPS + 3) // 4 * 128, WORDS)
    gate_words, gate_codes = _matrix_at(
        gate_at, gate_at + GATE_SCALE, first_row, GROUPS, WIDTH, WORDS
    )
    up_words, up_codes = _matrix_at(up_at, up_at + UP_SCALE, first_row, GROUPS, WIDTH, WORDS)
    gate, up = _products(
        gate_words, gate_codes, up_words, up_codes, x_at, inside,
        GROUPS, PAIRS, STAGES, WORDS,
    )  # fmt: skip
    result: gl.constexpr = gate.type.layout
    column = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, result))
    row = first_row + gl.arange(0, rows, layout=gl.SliceLayout(1, result))
    weight = gl.load(weights + start + column, mask=column < count, other=0.0)
    kind: gl.constexpr = activated.dtype.element_ty
    gate, up = gate.to(kind).to(gl.float32), up.to(kind).to(gl.float32)
    gate = or_nan(gate, gl.minimum(gate, limit))
    up = or_nan(up, gl.minimum(gl.maximum(up, -limit), limit))
    small = gl.exp(-gl.abs(gate))
    sigmoid = gl.where(gate < 0.0, small, 1.0) / (1.0 + small)
    value = (gate * sigmoid * up * gl.expand_dims(weight, 0)).to(kind)
    at = gl.expand_dims((start + column).to(gl.int64) * WIDTH, 0) + gl.expand_dims(row, 1)
    inside = gl.expand_dims(row < WIDTH, 1) & gl.expand_dims(column < count, 0)
    gl.store(activated + at, value, mask=inside)


@gluon.jit
def _store_part(parts, value, start, count, first_row, HIDDEN: gl.constexpr, PAIRS: gl.constexpr):
    rows: gl.constexpr = value.shape[0]
    result: gl.constexpr = value.type.layout
    column = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, result))
    row = first_row + gl.arange(0, rows, layout=gl.SliceLayout(1, result))
    at = gl.expand_dims((start + column).to(gl.int64) * HIDDEN, 0) + gl.expand_dims(row, 1)
    inside = gl.expand_dims(row < HIDDEN, 1) & gl.expand_dims(column < count, 0)
    gl.store(parts + at, value.to(parts.dtype.element_ty), mask=inside)


@gluon.jit(do_not_specialize=["n_groups"], do_not_specialize_on_alignment=["tiles"])
def _rows_down_kernel(
    x, tiles, pointers, parts, n_groups,
    DOWN_SCALE: gl.constexpr, GROUPS: gl.constexpr, HIDDEN: gl.constexpr,
    PAIRS: gl.constexpr, STAGES: gl.constexpr, WORDS: gl.constexpr,
):  # fmt: skip
    rows: gl.constexpr = WORDS.shape[0]
    tile = tiles + gl.program_id(1) * 3
    group, start, count = gl.load(tile), gl.load(tile + 1), gl.load(tile + 2)
    at = gl.load(pointers + 2 * n_groups + group)
    first_row = gl.program_id(0) * (2 * rows)
    if at == 0:
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [rows // 16, 1], [16, PAIRS, 16])
        none = gl.zeros([rows, PAIRS], gl.float32, layout=layout)
        _store_part(parts, none, start, count, first_row, HIDDEN, PAIRS)
        _store_part(parts, none, start, count, first_row + rows, HIDDEN, PAIRS)
        return
    x_at, inside = _columns_at(x, start, count, PAIRS, (GROUPS + 3) // 4 * 128, WORDS)
    first_words, first_codes = _matrix_at(at, at + DOWN_SCALE, first_row, GROUPS, HIDDEN, WORDS)
    # A block beyond the matrix reads its last one instead, and nothing of it is stored.
    last_row: gl.constexpr = (HIDDEN - 1) // rows * rows
    second_row = gl.minimum(first_row + rows, last_row)
    second_words, second_codes = _matrix_at(at, at + DOWN_SCALE, second_row, GROUPS, HIDDEN, WORDS)
    first, second = _products(
        first_words, first_codes, second_words, second_codes, x_at, inside,
        GROUPS, PAIRS, STAGES, WORDS,
    )  # fmt: skip
    _store_part(parts, first, start, count, first_row, HIDDEN, PAIRS)
    _store_part(parts, second, start, count, first_row + rows, HIDDEN, PAIRS)


def launch_layouts(
    x: Tensor,
    tokens: Tensor,
    weights: Tensor,
    starts: Sequence[int],
    pointers: Tensor,
    parts: Tensor,
    shape: Fp4Shape,
    limit: float,
) -> None:
    """Fill `parts` [R, hidden] with each pair's output."""
    n_groups = pointers.shape[1]
    tiles = device_tiles(starts, PAIRS, x.device)
    activated = torch.empty((len(tokens), shape.width), dtype=parts.dtype, device=x.device)
    rows = prepared_rows(x, tokens)
    for size, found in tiles.items():
        blocks = -(-shape.width // (16 * WARPS[size]))
        _rows_gate_up_kernel[(blocks, len(found))](
            rows, weights, found, pointers, activated, n_groups, limit,
            GATE_SCALE=shape.gate_scale, UP_SCALE=shape.up_scale, GROUPS=shape.hidden // 32,
            WIDTH=shape.width, **_options(size),
        )  # fmt: skip
    rows = prepared_rows(activated)
    for size, found in tiles.items():
        blocks = -(-shape.hidden // (32 * WARPS[size]))
        _rows_down_kernel[(blocks, len(found))](
            rows, found, pointers, parts, n_groups,
            DOWN_SCALE=shape.down_scale, GROUPS=shape.width // 32, HIDDEN=shape.hidden,
            **_options(size),
        )  # fmt: skip


def _options(size: int) -> dict[str, Any]:
    return {
        "PAIRS": size,
        "STAGES": STAGES[size],
        "WORDS": words_layout(WARPS[size]),
        "num_warps": WARPS[size],
        "maxnreg": REGISTERS[size],
    }
