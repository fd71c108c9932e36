"""A row rounded to fp8, kept as whole numbers cut into bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from .round_fp8 import GROUP, fp8_codes

UNITS = 512  # E4M3 values are whole multiples of 2^-9
N_PLANES = 3  # |value * UNITS| <= 448 * 512 fits 19 bits with its sign
BIAS = 192  # added to each doubled fp4 value so that a byte holds it without a sign


def byte_planes(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round groups of 32 values to fp8 and cut each value's multiple of 2^-9 into bytes.

    x        [T, k] bf16 or f32, k a multiple of 32
    returns  planes   [T, 3, 2, k / 8] i32: byte b of planes[t, p, h, w] is bits 8p .. 8p + 7 of
                      value 8 w + 4 h + b; planes 0 and 1 unsigned, plane 2 signed
             offsets  [T, k / 32] i32: -192 times the sum of the group's whole numbers
             scales   [T, k / 32] f32: x = whole number * 2 * scale; NaN, the numbers 0, where a
                      value of the group is no finite number

    The scale already halves, since fp4 weights are taken doubled.
    Source: model specification, section 2.2, ROUND_FP8; the planes are ours.
    """
    rows, k = x.shape
    groups = x.view(rows, k // GROUP, GROUP)
    is_finite = groups.isfinite().all(-1, keepdim=True)
    codes, scale = fp8_codes(torch.where(is_finite, groups, 0).view(rows, k))
    scale = torch.where(is_finite.view(scale.shape), scale, torch.nan)
    whole = (codes * UNITS).to(torch.int32)
    eights = whole.view(rows, k // 8, 2, 4)
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=x.device)
    planes = [
        (((eights >> 8 * p) & 255) << shifts).sum(-1).to(torch.int32) for p in range(N_PLANES)
    ]
    offsets = -BIAS * whole.view(rows, k // GROUP, GROUP).sum(-1).to(torch.int32)
    stacked = torch.stack(planes, 1).transpose(2, 3).contiguous()
    return stacked, offsets, scale.view(rows, k // GROUP) / (2 * UNITS)
