"""E8M0 scales: byte b means 2^(b - 127), and 255 is no number.

Source: OCP microscaling formats, scale format E8M0; model specification, section 2.1.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

NAME = "E8M0"
NOT_A_NUMBER = 255
LARGEST = 254
_EXPONENT_BITS = 0x7F800000
_MANTISSA_BITS = 0x007FFFFF


def decode(codes: Tensor) -> Tensor:
    """Scales of the codes, exact: 2^(code - 127), down to the subnormal 2^-127 of code 0.

    codes    [...] u8
    returns  [...] f32

    Raises ValueError on another dtype and on code 255.
    """
    if codes.dtype != torch.uint8:
        raise ValueError(f"{NAME}: scale codes are uint8, got {codes.dtype}")
    if codes.numel() and int(codes.amax()) == NOT_A_NUMBER:
        raise ValueError(f"{NAME}: scale byte 255 is not a number")
    return _values(codes.device).index_select(0, codes.reshape(-1).int()).view(codes.shape)


def power_of_two_at_least(values: Tensor) -> Tensor:
    """The least power of two that is >= each value, taken from the bits.

    values   [...] f32, positive and normal
    returns  [...] f32

    A logarithm would be off by one near exact powers; adding the full mantissa carries into the
    exponent exactly when the mantissa is not zero.
    """
    bits = values.view(torch.int32)
    return ((bits + _MANTISSA_BITS) & _EXPONENT_BITS).view(torch.float32)


def power_of_two_at_most(values: Tensor) -> Tensor:
    """The greatest power of two that is <= each magnitude; 0 for zero and for subnormals.

    values   [...] f32
    returns  [...] f32
    """
    return (values.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)


def biased_exponent(values: Tensor) -> Tensor:
    """The code of the greatest power of two that is <= each magnitude; 0 for zero and subnormals.

    values   [...] f32
    returns  [...] i32
    """
    return (values.view(torch.int32) >> 23) & 255


@lru_cache(maxsize=16)
def _values(device: torch.device) -> Tensor:
    exponents = torch.arange(256, dtype=torch.float64) - 127
    values = torch.pow(2.0, exponents).float()
    values[NOT_A_NUMBER] = torch.nan
    return values.to(device)
