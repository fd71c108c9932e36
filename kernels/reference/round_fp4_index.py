"""Activation rounding of index queries and index keys."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.formats import e8m0, fp4

GROUP = 32
_AMAX_FLOOR = 6 * 2.0**-126
_RECIPROCAL = 0.1666666716337204  # 1 / 6 as f32: the product is part of the definition


def round_fp4_index(x: Tensor) -> Tensor:
    """Round groups of 32 channels to E2M1 with a power-of-two scale, and scale back.

    x        [..., k] bf16 or f32, k a multiple of 32
    returns  [..., k] f32, each value exact in bf16

    s = least power of two >= max(amax, 6 * 2^-126) * f32(1 / 6); y = s * E2M1(x / s).
    Source: model specification, section 2.2, ROUND_FP4_IDX.
    """
    groups = torch.unflatten(x.float(), -1, (-1, GROUP))
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(_AMAX_FLOOR)
    scale = e8m0.power_of_two_at_least(amax * _RECIPROCAL)
    return (fp4.round_to_grid(groups / scale) * scale).flatten(-2)
