"""Activation rounding of every input of an fp8 or fp4 matrix, and of window rows."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.formats import e8m0, fp8

GROUP = 32
_AMAX_FLOOR = 1e-4
_RECIPROCAL = 0.0022321429569274187  # 1 / 448 as f32: the product is part of the definition


def round_fp8(x: Tensor) -> Tensor:
    """Round groups of 32 channels to E4M3 with a power-of-two scale, and scale back.

    x        [..., k] bf16 or f32, k a multiple of 32
    returns  [..., k] f32, each value exact in bf16

    s = least power of two >= max(amax, 1e-4) * f32(1 / 448); y = s * E4M3(x / s).
    Source: model specification, section 2.2, ROUND_FP8.
    """
    codes, scale = fp8_codes(x)
    return (codes * scale).flatten(-2)


def fp8_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split what `round_fp8` gives into E4M3 values and scales.

    returns  [..., k / 32, 32] f32 on the E4M3 grid and [..., k / 32, 1] f32 powers of two
    """
    groups = torch.unflatten(x.float(), -1, (-1, GROUP))
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(_AMAX_FLOOR)
    scale = e8m0.power_of_two_at_least(amax * _RECIPROCAL)
    return fp8.round_to_grid(groups / scale), scale
