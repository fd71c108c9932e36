"""Rows of block formats times one q8_1 row, value by value: what every device and CI can run.

Invariants: products within groups of 16 and with the groups' scales are exact whole numbers, as in
`block_words.py`; only the f32 sums over groups have another order. Source: ggml block layouts.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _byte(at, mask):
    return tl.load(at, mask=mask, other=0).to(tl.int32)


@triton.jit
def _half(at, mask):
    bits = _byte(at, mask) | (_byte(at + 1, mask) << 8)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _signed(byte):
    return byte - ((byte & 128) << 1)


@triton.jit
def _values(at, i, mask, FORMAT: tl.constexpr):
    """Return the whole numbers of values i of super-blocks, offset and all."""
    if FORMAT == "Q2_K":
        q = (_byte(at + 16 + 32 * (i // 128) + i % 32, mask) >> (2 * (i // 32 % 4))) & 3
    elif FORMAT == "Q3_K":
        q = (_byte(at + 32 + 32 * (i // 128) + i % 32, mask) >> (2 * (i // 32 % 4))) & 3
        q += (((_byte(at + i % 32, mask) >> (i // 32)) & 1) << 2) - 4
    elif FORMAT == "Q4_K":
        q = (_byte(at + 16 + 32 * (i // 64) + i % 32, mask) >> (4 * (i // 32 % 2))) & 15
    elif FORMAT == "Q6_K":
        q = (_byte(at + 64 * (i // 128) + i % 64, mask) >> (4 * (i // 64 % 2))) & 15
        high = _byte(at + 128 + 32 * (i // 128) + i % 32, mask) >> (2 * (i // 32 % 4))
        q += ((high & 3) << 4) - 32
    else:
        q = _signed(_byte(at + 34 * (i // 32) + 2 + i % 32, mask))
    return q


@triton.jit
def _scales(at, g, mask, FORMAT: tl.constexpr):
    """Return each group of 16's whole scale and minimum, and the f16 scales of both."""
    if FORMAT == "Q2_K":
        byte = _byte(at + g, mask)
        scale, minimum = byte & 15, byte >> 4
        d, d_min = _half(at + 80, mask), _half(at + 82, mask)
    elif FORMAT == "Q3_K":
        scale = (_byte(at + 96 + g % 8, mask) >> (4 * (g // 8))) & 15
        scale += (((_byte(at + 104 + g % 4, mask) >> (2 * (g // 4))) & 3) << 4) - 32
        minimum, d = scale * 0, _half(at + 108, mask)
        d_min = d
    elif FORMAT == "Q4_K":
        first, second = _byte(at + 4 + g // 2 % 4, mask), _byte(at + 8 + g // 2 % 4, mask)
        third = _byte(at + 12 + g // 2 % 4, mask)
        scale = tl.where(g < 8, first & 63, (third & 15) | ((first >> 6) << 4))
        minimum = tl.where(g < 8, second & 63, (third >> 4) | ((second >> 6) << 4))
        d, d_min = _half(at, mask), _half(at + 2, mask)
    elif FORMAT == "Q6_K":
        scale = _signed(_byte(at + 192 + g, mask))
        minimum, d = scale * 0, _half(at + 208, mask)
        d_min = d
    else:
        d = _half(at + 34 * (g // 2), mask)
        scale = tl.where(mask, g * 0 + 1, 0)
        minimum, d_min = scale * 0, d
    return scale, minimum, d, d_min


@triton.jit
def plain_block_rows(
    matrix, codes, sides, rows, row_mask,
    FORMAT: tl.constexpr, BYTES: tl.constexpr, ROW_BYTES: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Return [len(rows)] f32: rows of blocks at `matrix` (u8) times one q8_1 row."""
    units: tl.constexpr = (K + 127) // 128
    group, within = tl.arange(0, 16), tl.arange(0, 16)
    i = group[:, None] * 16 + within[None, :]
    total = tl.zeros([rows.shape[0], 16], tl.float32)
    start = matrix + rows.to(tl.int64) * ROW_BYTES
    for block in range((K + 255) // 256):
        at = start + block * BYTES
        inside = row_mask[:, None] & (block * 256 + group * 16 < K)[None, :]
        q = _values(at[:, None, None], i[None, :, :], inside[:, :, None], FORMAT)
        scale, minimum, d, d_min = _scales(at[:, None], group[None, :], inside, FORMAT)
        unit = block * 2 + group // 8
        present = unit < units
        code_at = ((group % 8) * units + unit)[:, None] * 16 + within[None, :]
        code = tl.load(codes + code_at, mask=present[:, None], other=0).to(tl.int32)
        side = sides + unit * 8 + group % 8 // 2
        row_scale = tl.load(side, mask=present, other=0).to(tl.float32, bitcast=True)[None, :]
        whole = tl.sum(q * code[None, :, :], 2) * scale
        offset = tl.sum(code, 1)[None, :] * minimum
        total += row_scale * (d * whole.to(tl.float32) - d_min * offset.to(tl.float32))
    return tl.sum(total, 1)
