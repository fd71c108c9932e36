"""Activation rounding of compressed latent rows."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.formats import fp4, fp8

GROUP = 16
_AMAX_FLOOR = 6 * 2.0**-9


def round_fp4_latent(x: Tensor) -> Tensor:
    """Round groups of 16 channels to E2M1 with an E4M3 scale, and scale back.

    x        [..., k] bf16 or f32, k a multiple of 16
    returns  [..., k] f32, each value exact in bf16

    s = E4M3(max(amax, 6 * 2^-9) / 6), a true division; y = s * E2M1(x / s).
    Source: model specification, section 2.2, ROUND_FP4_KV.
    """
    groups = torch.unflatten(x.float(), -1, (-1, GROUP))
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(_AMAX_FLOOR)
    scale = fp8.round_to_grid(amax / fp4.MAX)
    return (fp4.round_to_grid(groups / scale) * scale).flatten(-2)
