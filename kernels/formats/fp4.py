"""E2M1 values (0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign), two in a byte, with E8M0 scales.

Byte k of a row holds element 2k in its low nibble and 2k + 1 in its high one; 32 values share a
scale. Value = E2M1 * 2^(scale - 127). Source: model specification, sections 2.1 and 6.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from . import e8m0
from .block import fold

NAME = "E2M1"
GROUP = 32
PER_BYTE = 2
MAX = 6.0
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Added and taken away again, 1.5 * 2^22 times a power of two leaves one mantissa bit below it.
_ONE_BIT = 1.5 * 2.0**22


def dequantise(packed: Tensor, scales: Tensor) -> Tensor:
    """A packed matrix with one scale for each 32 values of a row, exact.

    packed   [n, k / 2] u8
    scales   [n, k / 32] u8, E8M0
    returns  [n, k] f32

    Raises ValueError on a shape or dtype that differs and on scale byte 255.
    """
    if packed.dtype != torch.uint8:
        raise ValueError(f"{NAME}: packed values are uint8, got {packed.dtype}")
    n, half = packed.shape
    n_groups = half * PER_BYTE // GROUP
    if tuple(scales.shape) != (n, n_groups) or half * PER_BYTE % GROUP:
        raise ValueError(
            f"{NAME}: {tuple(packed.shape)} bytes want {(n, n_groups)} scales in whole groups of "
            f"{GROUP}, got {tuple(scales.shape)}"
        )
    pairs = _pairs(packed.device).index_select(0, packed.reshape(-1).int())
    values = torch.view_as_real(pairs).view(n, n_groups, GROUP)
    return (values * e8m0.decode(scales).unsqueeze(-1)).view(n, half * PER_BYTE)


def round_to_grid(values: Tensor) -> Tensor:
    """The nearest E2M1 value, ties to the even code, saturating at +-6; zero keeps its sign.

    values   [...] f32
    returns  [...] f32
    """
    clamped = values.clamp(-MAX, MAX)
    binade = e8m0.power_of_two_at_most(clamped).clamp_min(1.0)
    offset = binade * _ONE_BIT
    return torch.copysign((clamped + offset) - offset, values)


@lru_cache(maxsize=16)
def _pairs(device: torch.device) -> Tensor:
    # One complex number a byte: looking up eight bytes at once is four times as fast as two floats.
    values = torch.tensor([*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)])
    codes = torch.arange(256)
    return torch.complex(values[codes & 15], values[codes >> 4]).to(device)


def encode(values: Tensor) -> Tensor:
    """The nearest E2M1 codes, ties to the even one, saturating at +-6; zero keeps its sign.

    values   [...] f32
    returns  [...] u8, 0..15
    """
    size = values.abs()
    # Whether a midpoint belongs to the code above it decides between > and >=.
    code = (size > 0.25).to(torch.uint8) + (size >= 0.75) + (size > 1.25) + (size >= 1.75)
    code = code + (size > 2.5) + (size >= 3.5) + (size > 5.0)
    return code | (torch.signbit(values).to(torch.uint8) << 3)


def quantise_groups(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of groups of 32 values, each scale the better of the two that fit.

    values   [n, 32] f32
    returns  [n, 32] u8 codes and [n, 1] u8 E8M0 scales

    The smaller scale cuts off a largest value above 6, the larger one is coarser; the one of less
    squared error is taken. Values that lie on one group's grid come back exactly.
    """
    # The largest magnitude's exponent, less the 2 of the largest power of two in E2M1.
    exponent = e8m0.biased_exponent(values.abs().amax(-1, keepdim=True))
    low = (exponent - 2).clamp(0, e8m0.LARGEST - 1).to(torch.uint8)
    high = low + 1
    low_codes, low_error = _codes_and_error(values, low)
    high_codes, high_error = _codes_and_error(values, high)
    # Each error is in units of its own scale, squared: twice the scale, four times the error.
    better = 4 * high_error < low_error
    return torch.where(better, high_codes, low_codes), torch.where(better, high, low)


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix packed with one scale for each 32 values of a row.

    values   [n, k] f32, k a multiple of 32
    returns  [n, k / 2] u8 and [n, k / 32] u8, as `dequantise` takes them

    Raises ValueError on another shape and on values that are not finite.
    """
    n, k = values.shape
    if k % GROUP:
        raise ValueError(f"{NAME}: rows are whole groups of {GROUP}, got {k} values")
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"{NAME}: a value is not finite")
    codes, scales = quantise_groups(values.float().reshape(-1, GROUP))
    pairs = codes.view(n, k // PER_BYTE, PER_BYTE)
    return pairs[..., 0] | (pairs[..., 1] << 4), scales.view(n, k // GROUP)


def _codes_and_error(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    scaled = values / e8m0.decode(scales)
    codes = encode(scaled)
    magnitude = torch.tensor(MAGNITUDES, device=values.device)[(codes & 7).int()]
    miss = magnitude - scaled.abs()
    return codes, fold((miss * miss).T).unsqueeze(-1)
