"""Rows rounded to eight bits for whole-number products with K-quants and Q8_0 weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import runs_kernels
from .early_launch import early, join_previous
from .reference import q8_1_rows as reference
from .tensor_checks import check_contiguous, check_tensor

Rows = tuple[Tensor, Tensor]

_SMALLEST = tl.constexpr(reference.SMALLEST)


@triton.jit
def _q8_1_rows_kernel(x, codes, sides, k, n_units, EARLY: tl.constexpr):
    join_previous(EARLY)
    unit, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    group, within = tl.arange(0, 4), tl.arange(0, 16)
    half = tl.arange(0, 2)
    at = unit * 128 + group[:, None, None] * 32 + half[None, :, None] * 16 + within[None, None, :]
    v = tl.load(x + row * k + at, mask=at < k, other=0.0).to(tl.float32)
    # As whole numbers NaN is above all others; a float maximum drops it.
    largest = tl.max(tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2), 1)
    is_finite = largest < 0x7F800000
    v = tl.where(is_finite[:, None, None], v, 0.0)
    amax = tl.where(is_finite, largest, 0).to(tl.float32, bitcast=True)
    amax = tl.where(amax < _SMALLEST, 0.0, amax)
    scale = tl.div_rn(amax, tl.full([4], 127.0, tl.float32)).to(tl.int32, bitcast=True)
    scale = tl.where(is_finite, scale, 0x7FC00000)
    inverse = tl.div_rn(tl.full([4], 127.0, tl.float32), tl.where(amax == 0.0, 1.0, amax))
    inverse = tl.where(amax == 0.0, 0.0, inverse)
    # Added and taken away again, 1.5 * 2^23 leaves whole numbers, ties to even.
    code = ((v * inverse[:, None, None] + 12582912.0) - 12582912.0).to(tl.int32)
    vector = group[:, None, None] * 2 + half[None, :, None]
    tiled = ((row * 8 + vector) * n_units + unit) * 16 + within[None, None, :]
    tl.store(codes + tiled, code.to(tl.int8))
    sums = tl.sum(code, 2)
    # Two i16 in a word: the upper half is shifted, the lower one cut off.
    word = tl.sum(tl.where(half == 0, sums & 0xFFFF, sums << 16), 1)
    out = sides + (row * n_units + unit) * 8 + group
    tl.store(out, scale)
    tl.store(out + 4, word)


def q8_1_rows(x: Tensor, *, out: Rows | None = None) -> Rows:
    """Round groups of 32 values to multiples of a 127th of the largest magnitude, ties to even.

    x        [T, k] bf16 or f32, contiguous, k a multiple of 32
    returns  codes [T, 8, ceil(k / 128), 16] i8, sides [T, ceil(k / 128), 8] i32 with scales and
             sums, as `reference.q8_1_rows` describes; in `out` where given

    Raises ValueError on a shape or dtype that differs. Bits equal `reference.q8_1_rows`.
    Source: ggml's q8_1, with scales in f32 and sums of codes instead of values.
    """
    if x.dim() != 2 or x.shape[1] % 32 or x.dtype not in {torch.bfloat16, torch.float32}:
        raise ValueError(f"q8_1_rows: x is {x.dtype} {tuple(x.shape)}, wanted [T, 32 n] floats")
    check_contiguous("q8_1_rows", x=x)
    rows, k = x.shape
    codes, sides = empty_rows(rows, k, x.device) if out is None else out
    n_units = -(-k // 128)
    check_tensor("q8_1_rows", "out[0]", codes, (rows, 8, n_units, 16), torch.int8)
    check_tensor("q8_1_rows", "out[1]", sides, (rows, n_units, 8), torch.int32)
    if not runs_kernels(x):
        for target, part in zip((codes, sides), reference.q8_1_rows(x), strict=True):
            target.copy_(part)
    elif rows:
        # No fused multiply-add: it would round once where the definition rounds twice.
        _q8_1_rows_kernel[(n_units, rows)](
            x, codes, sides, k, n_units, num_warps=1, enable_fp_fusion=False, **early(x.device)
        )
    return codes, sides


def empty_rows(rows: int, k: int, device: torch.device) -> Rows:
    """Return unwritten codes and sides for `rows` rows of k values."""
    n_units = -(-k // 128)
    codes = torch.empty((rows, 8, n_units, 16), dtype=torch.int8, device=device)
    sides = torch.empty((rows, n_units, 8), dtype=torch.int32, device=device)
    return codes, sides
