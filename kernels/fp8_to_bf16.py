"""A stored fp8 matrix as bf16, for products that torch makes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bf16_bits import round_to_bf16
from .device import runs_kernels
from .reference import fp8_to_bf16 as reference
from .tensor_checks import check_contiguous

_ROWS, _TILES = 8, 16  # of a program; a tile is 32 columns wide


@triton.jit
def _fp8_to_bf16_kernel(codes, scales, out, n, k, k_tiles, ROWS: tl.constexpr, TILES: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None, None]
    tile = (tl.program_id(1) * TILES + tl.arange(0, TILES))[None, :, None]
    column = tile * 32 + tl.arange(0, 32)[None, None, :]
    at = row.to(tl.int64) * k + column
    inside = (row < n) & (column < k)
    code = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
    # The code's seven low bits, moved to an f32's exponent and mantissa, are 2^-120 of the value.
    size = ((code & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    size = tl.where((code & 127) == 127, float("nan"), size)
    value = tl.where(code > 127, -size, size)
    scale = tl.load(scales + row // 32 * k_tiles + tile, mask=(row < n) & (tile < k_tiles), other=0)
    scale = scale.to(tl.int32)
    bits = tl.where(scale == 0, 0x00400000, scale << 23)
    tl.store(out + at, round_to_bf16(value * bits.to(tl.float32, bitcast=True)), mask=inside)


def fp8_to_bf16(codes: Tensor, scales: Tensor) -> Tensor:
    """Dequantise a matrix with one scale for each 32 x 32 tile.

    codes    [n, k] u8 E4M3, contiguous
    scales   [ceil(n / 32), ceil(k / 32)] u8 E8M0, none of them 255, contiguous
    returns  [n, k] bf16, exact but for values beyond bf16's subnormal numbers

    Raises ValueError on a shape or dtype that differs. Bits equal `reference.fp8_to_bf16`.
    Source: model specification, sections 2.1 and 6.
    """
    n, k = codes.shape
    wanted = (-(-n // 32), -(-k // 32))
    if codes.dtype != torch.uint8 or scales.dtype != torch.uint8 or tuple(scales.shape) != wanted:
        raise ValueError(
            f"fp8_to_bf16: codes are {codes.dtype} {tuple(codes.shape)}, "
            f"scales {scales.dtype} {tuple(scales.shape)}, wanted uint8, scales {wanted}"
        )
    check_contiguous("fp8_to_bf16", codes=codes, scales=scales)
    if not runs_kernels(codes):
        return reference.fp8_to_bf16(codes, scales)
    out = torch.empty((n, k), dtype=torch.bfloat16, device=codes.device)
    if n and k:
        grid = (triton.cdiv(n, _ROWS), triton.cdiv(wanted[1], _TILES))
        _fp8_to_bf16_kernel[grid](
            codes, scales, out, n, k, wanted[1], ROWS=_ROWS, TILES=_TILES, num_warps=4
        )
    return out
