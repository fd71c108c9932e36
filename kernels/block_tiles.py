"""Rows of GGUF blocks times many rows rounded to eight bits, on tensor cores: the shared part.

A group's codes times its whole scale are whole numbers of eight bits where the format allows it
(Q2_K, Q3_K); else a product of codes alone is multiplied with the group's scale. Invariants:
products of whole numbers are exact; a super-block's sums over scales of the rows are taken in
order, then multiplied with its f16 scale; so an output's bits depend on its two rows alone, not on
the tile. Minima meet the rows' sums in two products of ten bits each, which keep 21 bits of a sum.
Source: ggml block layouts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import block_code_bytes

_Q2_K = tl.constexpr(block_code_bytes.Q2_K)
_Q3_K = tl.constexpr(block_code_bytes.Q3_K)
_Q4_K = tl.constexpr(block_code_bytes.Q4_K)
_Q6_K = tl.constexpr(block_code_bytes.Q6_K)
_Q2_K_OPERANDS = tl.constexpr(block_code_bytes.Q2_K_OPERANDS)
_Q3_K_OPERANDS = tl.constexpr(block_code_bytes.Q3_K_OPERANDS)
_Q4_K_OPERANDS = tl.constexpr(block_code_bytes.Q4_K_OPERANDS)
_Q6_K_OPERANDS = tl.constexpr(block_code_bytes.Q6_K_OPERANDS)
_HIGH_BITS = tl.constexpr(-8192)  # of an f32 that tensor cores take as it is


@triton.jit
def _half(at):
    return tl.load(at.to(tl.pointer_type(tl.float16), bitcast=True)).to(tl.float32)


@triton.jit
def _by_halves(scale, ROWS: tl.constexpr):
    """Return [ROWS, 32] of [ROWS, 2]: one for each 16 values."""
    return tl.reshape(tl.broadcast_to(scale[:, :, None], [ROWS, 2, 16]), [ROWS, 32])


@triton.jit
def _scaled_q2_k(at, S: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr):
    """Return [ROWS, 32] i8 of the S-th 32 values: codes times scales."""
    byte, half = tl.arange(0, 32)[None, :], tl.arange(0, 2)[None, :]
    q = tl.load(at[:, None] + (16 + 32 * (S // 4)) + byte)
    scale = _by_halves(tl.load(at[:, None] + 2 * S + half).to(tl.int32) & 15, ROWS)
    if PTX:
        value = tl.inline_asm_elementwise(
            _Q2_K[S], _Q2_K_OPERANDS, [q, scale], dtype=tl.int8, is_pure=True, pack=4
        )
    else:
        value = (((q >> (2 * (S % 4))) & 3) * scale).to(tl.int8)
    return value


@triton.jit
def _scaled_q3_k(at, S: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr):
    """Return [ROWS, 32] i8 of the S-th 32 values: codes times scales, with the other sign.

    They are from -128 to 124: with their own sign 128 would be one too many.
    """
    byte, half = tl.arange(0, 32)[None, :], tl.arange(0, 2)[None, :]
    h: tl.constexpr = S // 4
    j: tl.constexpr = S % 4
    q = tl.load(at[:, None] + (32 + 32 * h) + byte)
    third = tl.load(at[:, None] + byte)
    low = tl.load(at[:, None] + (96 + 2 * j) + half).to(tl.int32) >> (4 * h)
    high = tl.load(at[:, None] + (104 + 2 * (j % 2)) + half).to(tl.int32) >> (2 * (S // 2))
    scale = ((low & 15) | ((high & 3) << 4)) - 32
    if PTX:
        raised = _by_halves((128 + 4 * scale) * 0x01010101, ROWS)
        value = tl.inline_asm_elementwise(
            _Q3_K[S], _Q3_K_OPERANDS, [q, third, _by_halves(-scale, ROWS), raised],
            dtype=tl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        code = ((q >> (2 * j)) & 3) | (((third >> S) & 1) << 2)
        value = ((4 - code.to(tl.int32)) * _by_halves(scale, ROWS)).to(tl.int8)
    return value


@triton.jit
def _codes(at, inside, FORMAT: tl.constexpr, S: tl.constexpr, PTX: tl.constexpr):
    """Return [ROWS, 32] i8 of the S-th 32 values: codes alone."""
    byte = tl.arange(0, 32)[None, :]
    if FORMAT == "Q4_K":
        q = tl.load(at[:, None] + (16 + 32 * (S // 2)) + byte)
        if PTX:
            value = tl.inline_asm_elementwise(
                _Q4_K[S], _Q4_K_OPERANDS, [q], dtype=tl.int8, is_pure=True, pack=4
            )
        else:
            value = ((q >> (4 * (S % 2))) & 15).to(tl.int8)
    elif FORMAT == "Q6_K":
        low = tl.load(at[:, None] + (64 * (S // 4) + 32 * (S % 2)) + byte)
        high = tl.load(at[:, None] + (128 + 32 * (S // 4)) + byte)
        if PTX:
            value = tl.inline_asm_elementwise(
                _Q6_K[S], _Q6_K_OPERANDS, [low, high], dtype=tl.int8, is_pure=True, pack=4
            )
        else:
            code = (low >> (4 * (S % 4 // 2))) & 15 | ((high >> (2 * (S % 4))) & 3) << 4
            value = code.to(tl.int8) - 32
    else:
        code_at = (at + (34 * S + 2)).to(tl.pointer_type(tl.int8), bitcast=True)
        value = tl.load(code_at[:, None] + byte, mask=inside, other=0)
    return value


@triton.jit
def _whole_scale(at, FORMAT: tl.constexpr, S: tl.constexpr, HALF: tl.constexpr):
    """Return [ROWS] i32: the scale of the S-th 32 values, or of a half of them."""
    if FORMAT == "Q4_K":
        if S < 4:
            scale = (tl.load(at + (4 + S)) & 63).to(tl.int32)
        else:
            first, third = tl.load(at + S), tl.load(at + (8 + S))
            scale = ((third & 15) | ((first >> 6) << 4)).to(tl.int32)
    else:
        at = (at + (192 + 2 * S + HALF)).to(tl.pointer_type(tl.int8), bitcast=True)
        scale = tl.load(at).to(tl.int32)
    return scale


@triton.jit
def _minima(at, FORMAT: tl.constexpr):
    """Return [ROWS, 16] f32: the whole minima of all groups of 16 values."""
    group = tl.arange(0, 16)[None, :]
    if FORMAT == "Q2_K":
        minimum = tl.load(at[:, None] + group) >> 4
    else:
        group = group // 2
        second = tl.load(at[:, None] + 8 + group % 4)
        third = tl.load(at[:, None] + 12 + group % 4)
        minimum = tl.where(group < 4, second & 63, (third >> 4) | ((second >> 6) << 4))
    return minimum.to(tl.float32)


@triton.jit
def _minima_products(at, sums_at, FORMAT: tl.constexpr):
    """Return [ROWS, PAIRS] f32: whole minima times the rows' sums, which begin at `sums_at`."""
    total = tl.load(sums_at[None, :] + tl.arange(0, 16)[:, None])
    high = (total.to(tl.int32, bitcast=True) & _HIGH_BITS).to(tl.float32, bitcast=True)
    minimum = _minima(at, FORMAT)
    found = tl.dot(minimum, high, input_precision="tf32")
    return tl.dot(minimum, total - high, found, input_precision="tf32")


@triton.jit
def block_products(
    matrix, codes, scales, sums, first, row,
    FORMAT: tl.constexpr, BYTES: tl.constexpr, ROW_BYTES: tl.constexpr, K: tl.constexpr,
    PAIRS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Return [len(row), PAIRS] f32: rows of blocks at `matrix` times tiled rows from `first` on.

    row    rows of the matrix, all of them within it
    first  of as many rows of codes, scales and sums, all of them in memory, and one behind them:
           addresses that are alike for all tiles take few registers
    BYTES, ROW_BYTES  of a super-block of 256 values, of a row
    """
    ROWS: tl.constexpr = row.shape[0]
    units: tl.constexpr = (K + 127) // 128
    groups: tl.constexpr = units * (2 if FORMAT == "Q2_K" else 4)
    total = tl.zeros([ROWS, PAIRS], tl.float32)
    byte, pair = tl.arange(0, 32), tl.arange(0, PAIRS)
    start = matrix + row * ROW_BYTES
    x_start = codes + first * (units * 128) + (pair[None, :] * (units * 128) + byte[:, None])
    scales_start = scales + first * groups + pair * groups
    sums_start = sums + first * (units * 8) + pair * (units * 8)
    for block in range((K + 255) // 256):
        at = start + block * BYTES
        inner = tl.zeros([ROWS, PAIRS], tl.float32)
        part = tl.zeros([ROWS, PAIRS], tl.int32)
        for s in tl.static_range(8):
            x_at = x_start + (block * 256 + s * 32)
            if FORMAT == "Q2_K":
                x = tl.load(x_at)
                part = tl.dot(_scaled_q2_k(at, s, ROWS, PTX), x, part, out_dtype=tl.int32)
                if s % 2 == 1:
                    x_scale = tl.load(scales_start + (block * 4 + s // 2))
                    inner = tl.fma(part.to(tl.float32), x_scale[None, :], inner)
                    part = tl.zeros([ROWS, PAIRS], tl.int32)
            else:
                # What is beyond the row is of another one.
                stored = (pair >= 0) & (block * 8 + s < units * 4)
                if K % 256 == 0:
                    x_scale = tl.load(scales_start + (block * 8 + s))
                else:
                    x_scale = tl.load(scales_start + (block * 8 + s), mask=stored, other=0.0)
                value = _group_products(at, x_at, block, FORMAT, s, K, ROWS, PTX)
                inner = tl.fma(value, x_scale[None, :], inner)
        if FORMAT == "Q8_0":
            total += inner
        elif FORMAT == "Q6_K":
            total = tl.fma(inner, _half(at + 208)[:, None], total)
        elif FORMAT == "Q3_K":
            total = tl.fma(inner, -_half(at + 108)[:, None], total)
        else:
            d_at: tl.constexpr = 80 if FORMAT == "Q2_K" else 0
            minima = _minima_products(at, sums_start + block * 16, FORMAT)
            total = tl.fma(inner, _half(at + d_at)[:, None], total)
            total = tl.fma(minima, -_half(at + (d_at + 2))[:, None], total)
    return total


@triton.jit
def _group_products(
    at, x_at, block, FORMAT: tl.constexpr, S: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Return [ROWS, PAIRS] f32: the S-th 32 values of a block, scaled, times codes [32, PAIRS]."""
    if FORMAT == "Q6_K":  # a scale for 16 values: the others meet zeros
        q = _codes(at, None, FORMAT, S, PTX)
        first = tl.arange(0, 32)[:, None] < 16
        low = tl.load(x_at, mask=first, other=0)
        high = tl.load(x_at, mask=first == 0, other=0)
        low = tl.dot(q, low, out_dtype=tl.int32) * _whole_scale(at, FORMAT, S, 0)[:, None]
        high = tl.dot(q, high, out_dtype=tl.int32) * _whole_scale(at, FORMAT, S, 1)[:, None]
        value = (low + high).to(tl.float32)
    else:
        x = tl.load(x_at)
        if FORMAT == "Q3_K":
            value = tl.dot(_scaled_q3_k(at, S, ROWS, PTX), x, out_dtype=tl.int32).to(tl.float32)
        elif FORMAT == "Q4_K":
            value = tl.dot(_codes(at, None, FORMAT, S, PTX), x, out_dtype=tl.int32).to(tl.float32)
            value *= _whole_scale(at, FORMAT, S, 0).to(tl.float32)[:, None]
        else:
            stored = block * 256 + S * 32 < K
            scale_at = (at + 34 * S).to(tl.pointer_type(tl.float16), bitcast=True)
            scale = tl.load(scale_at, mask=stored, other=0.0).to(tl.float32)
            q = _codes(at, stored, FORMAT, S, PTX)
            value = tl.dot(q, x, out_dtype=tl.int32).to(tl.float32) * scale[:, None]
    return value
