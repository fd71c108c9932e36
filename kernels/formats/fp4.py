"""E2M1 values (0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign), two in a byte, with E8M0 scales.

Byte k of a row holds element 2k in its low nibble and 2k + 1 in its high one; 32 values share a
scale. Value = E2M1 * 2^(scale - 127). Source: model specification, sections 2.1 and 6.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from . import e8m0

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
