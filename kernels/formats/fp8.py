"""E4M3 values (1 sign, 4 exponent, 3 mantissa bits; no infinity) with E8M0 scales.

A matrix has one scale for each 32 x 32 tile; an Engram row has one for each 32 values.
Value = E4M3 * 2^(scale - 127). Source: model specification, sections 2.1 and 6.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from . import e8m0

NAME = "E4M3"
TILE = 32
MAX = 448.0
_LEAST_NORMAL = 2.0**-6
# Added and taken away again, 1.5 * 2^20 times a power of two leaves three mantissa bits below it.
_THREE_BITS = 1.5 * 2.0**20


def decode(codes: Tensor) -> Tensor:
    """E4M3 values of the codes, exact; 0x7F and 0xFF are NaN.

    codes    [...] u8
    returns  [...] f32
    """
    if codes.dtype != torch.uint8:
        raise ValueError(f"{NAME}: codes are uint8, got {codes.dtype}")
    return _values(codes.device).index_select(0, codes.reshape(-1).int()).view(codes.shape)


def dequantise_tiles(codes: Tensor, scales: Tensor) -> Tensor:
    """A matrix with one scale for each 32 x 32 tile, exact.

    codes    [n, k] u8
    scales   [ceil(n / 32), ceil(k / 32)] u8, E8M0
    returns  [n, k] f32

    Raises ValueError on a shape or dtype that differs and on scale byte 255.
    """
    n, k = codes.shape
    wanted = (-(-n // TILE), -(-k // TILE))
    if tuple(scales.shape) != wanted:
        raise ValueError(f"{NAME}: scales are {wanted}, got {tuple(scales.shape)}")
    spread = e8m0.decode(scales).repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)
    return decode(codes) * spread[:n, :k]


def dequantise_rows(codes: Tensor, scales: Tensor) -> Tensor:
    """Rows with one scale for each 32 values, exact.

    codes    [n, k] u8
    scales   [n, k / 32] u8, E8M0
    returns  [n, k] f32

    Raises ValueError on a shape or dtype that differs and on scale byte 255.
    """
    n, k = codes.shape
    if k % TILE or tuple(scales.shape) != (n, k // TILE):
        raise ValueError(f"{NAME}: scales are {(n, k // TILE)}, got {tuple(scales.shape)}")
    values = decode(codes).unflatten(1, (k // TILE, TILE))
    return (values * e8m0.decode(scales).unsqueeze(-1)).flatten(1)


def round_to_grid(values: Tensor) -> Tensor:
    """The nearest E4M3 value, ties to even, saturating at +-448; zero keeps its sign.

    values   [...] f32
    returns  [...] f32
    """
    clamped = values.clamp(-MAX, MAX)
    binade = e8m0.power_of_two_at_most(clamped).clamp_min(_LEAST_NORMAL)
    offset = binade * _THREE_BITS
    return torch.copysign((clamped + offset) - offset, values)


@lru_cache(maxsize=16)
def _values(device: torch.device) -> Tensor:
    codes = torch.arange(256, dtype=torch.uint8)
    return codes.view(torch.float8_e4m3fn).float().to(device)
