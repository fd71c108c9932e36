"""Rows rounded to eight bits, one scale for 32 values, with sums of the codes."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
UNIT = 128  # values whose scales and sums stand together
SMALLEST = 2.0**-100  # a group below it counts as zero: its reciprocal would not be finite


def q8_1_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round groups of 32 values to multiples of a 127th of the largest magnitude, ties to even.

    x        [T, k] bf16 or f32, k a multiple of 32
    returns  codes  [T, 8, ceil(k / 128), 16] i8: x = code * scale; the v-th 16 codes of all units
                    of 128 values stand together, so that lanes with neighbouring units load
                    neighbouring bytes
             sides  [T, ceil(k / 128), 8] i32: words 0-3 of a unit of 128 values are the f32 bits of
                    its groups' scales; words 4-7 hold two i16 each, the sums of 16 codes, the first
                    in the low half. What lies beyond k is 0; where a value of a group is no finite
                    number its scale is NaN, its codes are 0

    Source: ggml's q8_1, with scales in f32 and sums of codes instead of values.
    """
    rows, k = x.shape
    groups = x.float().view(rows, k // GROUP, GROUP)
    is_finite = groups.isfinite().all(-1, keepdim=True)
    groups = torch.where(is_finite, groups, 0)
    amax = groups.abs().amax(-1, keepdim=True)
    amax = torch.where(amax < SMALLEST, 0.0, amax)
    scales = torch.where(is_finite, amax / torch.full_like(amax, 127.0), torch.nan)
    inverse = torch.where(amax == 0, 0.0, torch.full_like(amax, 127.0) / amax)
    codes = (groups * inverse).round().to(torch.int8)
    sums = codes.view(rows, k // GROUP, 2, 16).int().sum(-1)
    words = (sums[..., 0] & 0xFFFF) | (sums[..., 1] << 16)
    n_units = -(-k // UNIT)
    sides = torch.zeros((rows, 2, n_units * 4), dtype=torch.int32, device=x.device)
    sides[:, 0, : k // GROUP] = scales.squeeze(-1).view(torch.int32)
    sides[:, 1, : k // GROUP] = words
    ordered = sides.view(rows, 2, n_units, 4).transpose(1, 2).reshape(rows, n_units, 8)
    padded = torch.zeros((rows, n_units * UNIT), dtype=torch.int8, device=x.device)
    padded[:, :k] = codes.view(rows, k)
    tiled = padded.view(rows, n_units, 8, 16).transpose(1, 2)
    return tiled.contiguous(), ordered.contiguous()


def in_order(codes: Tensor, k: int) -> Tensor:
    """Return the codes [T, k] i8 in the order of the values."""
    return codes.transpose(1, 2).flatten(1)[:, :k]


def row_scales(sides: Tensor, n_groups: int) -> Tensor:
    """Return the scales [T, n_groups] f32."""
    return sides[..., :4].flatten(1)[:, :n_groups].contiguous().view(torch.float32)


def row_sums(sides: Tensor, n_groups: int) -> Tensor:
    """Return the sums of 16 codes [T, 2 n_groups] i32."""
    words = sides[..., 4:].flatten(1)[:, :n_groups].contiguous()
    return words.view(torch.int16).int()


def dequantise(codes: Tensor, sides: Tensor, k: int) -> Tensor:
    """Return the rounded values [T, k] f64, exact."""
    scales = row_scales(sides, k // GROUP).double().unsqueeze(-1)
    groups = in_order(codes, k).reshape(-1, k // GROUP, GROUP)
    return (groups.double() * scales).flatten(1)
