"""A few rows times one dense matrix as it is stored: fp8 with 32 x 32 tiles, or bf16.

Invariants: weights are converted exactly and multiplied in f32; each lane sums its own groups of 16
in ascending order, then lanes are summed in a fixed tree: a row's bits depend on nothing else.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import runs_kernels, speaks_ptx
from .reference import gemv as reference
from .tensor_checks import check_contiguous, check_rows, check_tensor

MAX_ROWS = 8


@triton.jit
def _e4m3(code):
    # The code's seven low bits, moved to an f32's exponent and mantissa, are 2^-120 of the value.
    code = code.to(tl.int32)
    size = ((code & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    size = tl.where((code & 127) == 127, code | 0x7FC00000, size.to(tl.int32, bitcast=True))
    size = size.to(tl.float32, bitcast=True)
    return tl.where(code > 127, -size, size)


@triton.jit
def _gemv_kernel(
    x,
    weight,
    scales,
    out,
    n,
    k,
    k_tiles,
    rows_a_group,
    stride,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    x += tl.program_id(1) * stride + (first // rows_a_group) * k
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, k, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = (row < n)[:, None] & (at < k)[None, :]
        w = tl.load(weight + row[:, None].to(tl.int64) * k + at[None, :], mask=inside, other=0)
        value = tl.load(x + at, mask=at < k, other=0.0)[None, :]
        if SCALED:
            tile = (row // 32)[:, None] * k_tiles + (at // 32)[None, :]
            code = tl.load(scales + tile, mask=inside, other=0).to(tl.int32)
            bits = tl.where(code == 0, 0x00400000, code << 23)
            total += _e4m3(w) * (value * bits.to(tl.float32, bitcast=True))
        else:
            total += w.to(tl.float32) * value
    tl.store(out + tl.program_id(1) * n + row, tl.sum(total, 1), mask=row < n)


def gemv(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None = None,
    *,
    groups: int = 1,
    plain: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply a few rows with a matrix as it is stored: x . weight^T, summed in f32.

    x        [M, groups * k] f32, rows contiguous, M at most 8
    weight   [n, k] u8 E4M3 codes, or bf16
    scales   [ceil(n / 32), ceil(k / 32)] u8 E8M0 for E4M3, None for bf16
    groups   as many equal parts of the matrix's rows, the g-th takes the g-th k channels of x
    plain    takes the body without explicit layouts on a GPU too, for comparison
    returns  [M, n] f32, in `out` where given: then nothing is allocated

    Raises ValueError on a shape or dtype that differs. Within 1e-6 (relative to the row's norm) of
    `reference.gemv`. Source: model specification, sections 2.2 and 3.3.
    """
    n, k = weight.shape
    _check(x, weight, scales, groups)
    if out is None:
        out = torch.empty((x.shape[0], n), dtype=torch.float32, device=x.device)
    check_tensor("gemv", "out", out, (x.shape[0], n), torch.float32)
    if not runs_kernels(x):
        return out.copy_(reference.gemv(x, weight, scales, groups))
    if x.shape[0] == 0:
        return out
    if speaks_ptx(x.device) and not plain:
        from .gemv_layouts import launch_layouts, tiles  # noqa: PLC0415  wants a GPU's compiler

        if tiles(n // groups, k):
            launch_layouts(x, weight, scales, out, groups)
            return out
    rows, block = 16 if groups == 1 else math.gcd(16, n // groups), 64
    grid = (triton.cdiv(n, rows), x.shape[0])
    stand_in = weight if scales is None else scales
    _gemv_kernel[grid](
        x, weight, stand_in, out, n, k, triton.cdiv(k, 32), n // groups, x.stride(0),
        SCALED=scales is not None, ROWS=rows, BLOCK=block,
    )  # fmt: skip
    return out


def _check(x: Tensor, weight: Tensor, scales: Tensor | None, groups: int) -> None:
    n, k = weight.shape
    if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != groups * k:
        raise ValueError(f"gemv: x is {x.dtype} {tuple(x.shape)}, wanted f32 [M, {groups * k}]")
    if x.shape[0] > MAX_ROWS:
        raise ValueError(f"gemv: {x.shape[0]} rows, at most {MAX_ROWS}")
    if n % groups:
        raise ValueError(f"gemv: {n} matrix rows do not make {groups} equal groups")
    check_rows("gemv", x=x)
    check_contiguous("gemv", weight=weight)
    wanted = torch.bfloat16 if scales is None else torch.uint8
    if weight.dtype != wanted:
        raise ValueError(f"gemv: weight is {weight.dtype}, wanted {wanted}")
    if scales is not None:
        check_tensor("gemv", "scales", scales, (-(-n // 32), -(-k // 32)), torch.uint8)
