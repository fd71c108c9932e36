"""Engram rows as they are stored, made into the input of the table's matrix, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bf16_bits import round_to_bf16
from .device import runs_kernels
from .reference import engram_rows as reference
from .round_fp8 import round_groups_to_fp8
from .tensor_checks import check_rows, check_tensor

_GROUPS_A_PROGRAM = 8
# name: number in the kernel, values and bytes of a block
_FORMATS = {"E4M3": (0, 32, 33), "Q8_0": (1, 32, 34), "Q2_K": (2, 256, 84)}


@triton.jit
def _f16(data, inside):
    low = tl.load(data, mask=inside, other=0).to(tl.int32)
    high = tl.load(data + 1, mask=inside, other=0).to(tl.int32)
    return (low | (high << 8)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _fp8_group(data, group, at, inside, WIDTH: tl.constexpr):
    code = tl.load(data + group * 32 + at, mask=inside, other=0).to(tl.int32)
    # The code's seven low bits, moved to an f32's exponent and mantissa, are 2^-120 of the value.
    size = ((code & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    value = tl.where((code & 127) == 127, float("nan"), tl.where(code > 127, -size, size))
    scale = tl.load(data + WIDTH + group + at * 0, mask=inside, other=127).to(tl.int32)
    bits = tl.where(scale == 0, 0x00400000, scale << 23)
    bits = tl.where(scale == 255, 0x7FC00000, bits)
    return value * bits.to(tl.float32, bitcast=True)


@triton.jit
def _q8_0_group(data, group, at, inside):
    code = tl.load(data + group * 34 + 2 + at, mask=inside, other=0).to(tl.int32)
    return ((code << 24) >> 24).to(tl.float32) * _f16(data + group * 34 + at * 0, inside)


@triton.jit
def _q2_k_group(data, group, at, inside):
    data += group // 8 * 84
    within = group % 8
    packed = tl.load(data + 16 + within // 4 * 32 + at, mask=inside, other=0).to(tl.int32)
    code = (packed >> (within % 4 * 2)) & 3
    scales = tl.load(data + within * 2 + at // 16, mask=inside, other=0).to(tl.int32)
    scale = _f16(data + 80 + at * 0, inside) * (scales & 15).to(tl.float32)
    least = _f16(data + 82 + at * 0, inside) * (scales >> 4).to(tl.float32)
    return scale * code.to(tl.float32) - least


@triton.jit
def _engram_rows_kernel(
    data,
    out,
    n_groups,
    stride,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUPS: tl.constexpr,
    BF16: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    flat = (tl.program_id(0) * GROUPS + tl.arange(0, GROUPS))[:, None]
    at = tl.arange(0, 32)[None, :]
    inside = flat < n_groups + at * 0
    group = flat % (WIDTH // 32)
    data += (flat // (WIDTH // 32)).to(tl.int64) * stride
    if FORMAT == 0:
        value = _fp8_group(data, group, at, inside, WIDTH)
    elif FORMAT == 1:
        value = _q8_0_group(data, group, at, inside)
    else:
        value = _q2_k_group(data, group, at, inside)
    if BF16:
        value = round_to_bf16(value)
    if ROUNDS:
        value = round_groups_to_fp8(value)
    tl.store(out + flat.to(tl.int64) * 32 + at, value, mask=inside)


def engram_rows(
    data: Tensor,
    dim: int,
    *,
    dtype: torch.dtype,
    rounds: bool,
    row_format: str = "E4M3",
    columns: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Dequantise rows of a table and round them for the matrix.

    data        [T * columns, bytes] u8, rows contiguous: what the row ring gave, a token's columns
                one after the other; bytes beyond a row's own are not read
    dim         values of a row
    row_format  "E4M3": dim values, then dim / 32 E8M0 scales; or "Q8_0" or "Q2_K" blocks
    columns     rows of one token; 0 = all rows are one token's
    returns     [T, columns * dim] f32: cast to `dtype`, then rounded to fp8 where `rounds`; in
                `out` where given, which may be `dtype` as well

    Raises ValueError on a shape, dtype or format that differs. Bits equal `reference.engram_rows`;
    on a device scale byte 255 gives NaN, where the reference raises.
    Source: model specification, section 3.2, Row read.
    """
    n_rows = len(data)
    columns = columns or n_rows
    number, values, n_bytes = _FORMATS.get(row_format, (0, 0, 0))
    if not values or dim % values or data.dtype != torch.uint8:
        raise ValueError(f"engram_rows: {data.dtype} rows of {dim} values as {row_format}")
    check_rows("engram_rows", data=data)
    if data.shape[1] < dim // values * n_bytes or (columns and n_rows % columns):
        raise ValueError(
            f"engram_rows: {tuple(data.shape)} bytes for {columns} columns of {dim} values"
        )
    shape = (n_rows // columns if columns else 0, columns * dim)
    if out is None:
        out = torch.empty(shape, dtype=torch.float32, device=data.device)
    kinds = {torch.float32, dtype}
    check_tensor("engram_rows", "out", out, shape, *kinds)
    if not runs_kernels(data):
        rows = data.unflatten(0, (-1, columns)) if n_rows else data.view(0, 0, data.shape[1])
        found = reference.engram_rows(rows, dim, dtype=dtype, rounds=rounds, row_format=row_format)
        return out.copy_(found)
    n_groups = n_rows * (dim // 32)
    if n_groups:
        _engram_rows_kernel[(triton.cdiv(n_groups, _GROUPS_A_PROGRAM),)](
            data, out, n_groups, data.stride(0), WIDTH=dim, FORMAT=number,
            GROUPS=_GROUPS_A_PROGRAM, BF16=dtype == torch.bfloat16, ROUNDS=rounds, num_warps=2,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out
