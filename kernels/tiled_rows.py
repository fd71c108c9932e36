"""Rows rounded to eight bits for products on tensor cores with K-quants and Q8_0 weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import runs_kernels
from .reference import tiled_rows as reference
from .reference.q8_1_rows import SMALLEST
from .reference.tiled_rows import GROUPS, TiledRows
from .tensor_checks import check_contiguous, check_tensor

_UNITS_A_PROGRAM = 8
_SMALLEST = tl.constexpr(SMALLEST)
_SUMS_OF_VALUES = tl.constexpr(reference.SUMS_OF_VALUES)


@triton.jit
def _half_as_many(v, UNITS: tl.constexpr, N: tl.constexpr):
    first, second = tl.split(tl.reshape(v, [UNITS, 8, N // 2, 2]))
    return first + second


@triton.jit(do_not_specialize_on_alignment=["tokens"])
def _tiled_rows_kernel(
    x, tokens, codes, scales, sums, n_rows, k, n_units,
    UNITS: tl.constexpr, GROUP: tl.constexpr, GATHERS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    source = row
    if GATHERS:
        source = tl.load(tokens + row, mask=row < n_rows, other=0).to(tl.int64)
    unit = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    n_groups: tl.constexpr = 128 // GROUP
    at = (unit * 128)[:, None] + tl.arange(0, 128)[None, :]
    v = tl.load(x + source * k + at, mask=at < tl.where(row < n_rows, k, 0), other=0.0).to(
        tl.float32
    )
    v = tl.reshape(v, [UNITS, n_groups, GROUP])
    # As whole numbers NaN is above all others; a float maximum drops it.
    largest = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2)
    is_finite = largest < 0x7F800000
    amax = tl.where(is_finite, largest, 0).to(tl.float32, bitcast=True)
    v = tl.where((amax < _SMALLEST)[:, :, None], 0.0, v)
    amax = tl.where(amax < _SMALLEST, 0.0, amax)
    top = tl.full([UNITS, n_groups], 127.0, tl.float32)
    scale = tl.div_rn(amax, top).to(tl.int32, bitcast=True)
    scale = tl.where(is_finite, scale, 0x7FC00000).to(tl.float32, bitcast=True)
    inverse = tl.where(amax == 0.0, 0.0, tl.div_rn(top, tl.where(amax == 0.0, 1.0, amax)))
    # Added and taken away again, 1.5 * 2^23 leaves whole numbers, ties to even.
    code = ((v * inverse[:, :, None] + 12582912.0) - 12582912.0).to(tl.int32)
    present = (unit < n_units)[:, None]
    flat = tl.reshape(code, [UNITS, 128])
    tl.store(codes + row * (n_units * 128) + at, flat.to(tl.int8), mask=present)
    group = unit[:, None] * n_groups + tl.arange(0, n_groups)[None, :]
    tl.store(scales + row * (n_units * n_groups) + group, scale, mask=present)
    of_codes = tl.sum(tl.reshape(code, [UNITS, 8, 16]), 2).to(tl.float32)
    spread = tl.broadcast_to(scale[:, :, None], [UNITS, n_groups, 8 // n_groups])
    total = of_codes * tl.reshape(spread, [UNITS, 8])
    place = tl.arange(0, 8)[None, :]
    if GROUP == 64:
        s = tl.reshape(v, [UNITS, 8, 16])
        s = _half_as_many(_half_as_many(s, UNITS, 16), UNITS, 8)  # neighbours first
        s = _half_as_many(_half_as_many(s, UNITS, 4), UNITS, 2)
        total = tl.where(place < _SUMS_OF_VALUES, tl.reshape(s, [UNITS, 8]), total)
    tl.store(sums + row * (n_units * 8) + unit[:, None] * 8 + place, total, mask=present)


def tiled_rows(
    x: Tensor,
    form: str,
    tokens: Tensor | None = None,
    *,
    spare: int = 0,
    out: TiledRows | None = None,
) -> TiledRows:
    """Round groups of values to multiples of a 127th of the largest magnitude, ties to even.

    x        [T, k] bf16 or f32, contiguous, k a multiple of 32
    form     "D4", scales of 32 values, or "D2S6", scales of 64 values and other sums
    tokens   [R] i32, the rows of x to take, contiguous; None: each once
    spare    rows of zeros to add
    returns  codes [R + spare, 128 n] i8, scales [R + spare, 4 n or 2 n] f32 and sums
             [R + spare, 8 n] f32 of n blocks, as `reference.tiled_rows` describes; in `out` where
             given

    Raises ValueError on a shape, dtype or form that differs. Bits equal `reference.tiled_rows`.
    Source: ggml's tiled activation blocks, with scales and sums in f32.
    """
    _check(x, form, tokens)
    rows, k = len(x if tokens is None else tokens), x.shape[1]
    n_units = -(-k // 128)
    wanted = empty_rows(rows + spare, k, form, torch.device("meta"))
    out = out or empty_rows(rows + spare, k, form, x.device)
    for name, part, other in zip(TiledRows._fields, out, wanted, strict=True):
        check_tensor("tiled_rows", f"out.{name}", part, tuple(other.shape), other.dtype)
    if not runs_kernels(x):
        found = reference.tiled_rows(x if tokens is None else x[tokens.long()], form)
        for target, part in zip(out, found, strict=True):
            target[:rows], target[rows:] = part, 0
    elif rows + spare:
        # No fused multiply-add: it would round once where the definition rounds twice. Rows are
        # the first axis of the grid: it alone takes more than 65,535.
        _tiled_rows_kernel[(rows + spare, triton.cdiv(n_units, _UNITS_A_PROGRAM))](
            x, x if tokens is None else tokens, *out, rows, k, n_units,
            UNITS=_UNITS_A_PROGRAM, GROUP=GROUPS[form], GATHERS=tokens is not None,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _check(x: Tensor, form: str, tokens: Tensor | None) -> None:
    if form not in GROUPS:
        raise ValueError(f"tiled_rows: form {form}, wanted one of {', '.join(GROUPS)}")
    if x.dim() != 2 or x.shape[1] % 32 or x.dtype not in {torch.bfloat16, torch.float32}:
        raise ValueError(f"tiled_rows: x is {x.dtype} {tuple(x.shape)}, wanted [T, 32 n] floats")
    check_contiguous("tiled_rows", x=x, tokens=tokens)
    if tokens is not None and tokens.dtype != torch.int32:
        raise ValueError(f"tiled_rows: tokens are {tokens.dtype}, wanted int32")


def empty_rows(rows: int, k: int, form: str, device: torch.device) -> TiledRows:
    """Return unwritten blocks for `rows` rows of k values."""
    n_units = -(-k // 128)
    return TiledRows(
        torch.empty((rows, n_units * 128), dtype=torch.int8, device=device),
        torch.empty((rows, n_units * 128 // GROUPS[form]), dtype=torch.float32, device=device),
        torch.empty((rows, n_units * 8), dtype=torch.float32, device=device),
    )
