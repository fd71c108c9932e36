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
    values = torch.unflatten(decode(codes), 1, (k // TILE, TILE))
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


def encode(values: Tensor) -> Tensor:
    """The nearest E4M3 codes, ties to even, saturating at +-448; zero keeps its sign.

    values   [...] f32
    returns  [...] u8
    """
    return values.clamp(-MAX, MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def quantise_tiles(values: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix with one scale for each 32 x 32 tile, the least that cuts nothing off.

    values   [n, k] f32
    returns  [n, k] u8 and [ceil(n / 32), ceil(k / 32)] u8, as `dequantise_tiles` takes them

    Raises ValueError on values that are not finite. Values that lie on one tile's grid come back
    exactly.
    """
    n, k = values.shape
    padded = torch.nn.functional.pad(values.float(), (0, -k % TILE, 0, -n % TILE))
    tiles = padded.view(-(-n // TILE), TILE, -(-k // TILE), TILE)
    scales = _scale_bytes(tiles.abs().amax((1, 3)))
    codes = encode(tiles / e8m0.decode(scales)[:, None, :, None])
    return codes.view(padded.shape)[:n, :k].contiguous(), scales


def quantise_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Rows with one scale for each 32 values, the least that cuts nothing off.

    values   [n, k] f32, k a multiple of 32
    returns  [n, k] u8 and [n, k / 32] u8, as `dequantise_rows` takes them

    Raises ValueError on another shape and on values that are not finite.
    """
    n, k = values.shape
    if k % TILE:
        raise ValueError(f"{NAME}: rows are whole groups of {TILE}, got {k} values")
    groups = values.float().reshape(n, k // TILE, TILE)
    scales = _scale_bytes(groups.abs().amax(-1))
    return encode(groups / e8m0.decode(scales).unsqueeze(-1)).view(n, k), scales


def _scale_bytes(largest: Tensor) -> Tensor:
    """Codes of the least powers of two s with largest <= 448 s."""
    if not bool(torch.isfinite(largest).all()):
        raise ValueError(f"{NAME}: a value is not finite")
    # 448 is 1.75 * 2^8: compare the mantissas instead of dividing, which would round.
    above = (largest.view(torch.int32) & 0x7FFFFF) > 0x600000
    code = e8m0.biased_exponent(largest) - 8 + above.int()
    return torch.where(largest == 0, 127, code.clamp(0, e8m0.LARGEST)).to(torch.uint8)


@lru_cache(maxsize=16)
def _values(device: torch.device) -> Tensor:
    codes = torch.arange(256, dtype=torch.uint8)
    return codes.view(torch.float8_e4m3fn).float().to(device)
