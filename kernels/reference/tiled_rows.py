"""Rows rounded to eight bits for the tensor cores: ggml's tiled blocks of 128 values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .q8_1_rows import SMALLEST, UNIT

# Values under one scale, by the name of the block.
GROUPS = {"D4": 32, "D2S6": 64}
SUM = 16  # values of a sum
SUMS_OF_VALUES = 6  # of the eight sums of a D2S6 block; all others are sums of codes


class TiledRows(NamedTuple):
    """Rows of blocks of 128 values; what lies beyond a row is 0."""

    codes: Tensor  # [T, ceil(k / 128) * 128] i8: x = code * scale
    scales: Tensor  # [T, ceil(k / 128) * 4 or 2] f32
    sums: Tensor  # [T, ceil(k / 128) * 8] f32, of 16 values each


def tiled_rows(x: Tensor, form: str) -> TiledRows:
    """Round groups of values to multiples of a 127th of the largest magnitude, ties to even.

    x     [T, k] bf16 or f32
    form  "D4": groups of 32, every sum is its codes' sum times their scale. "D2S6": groups of 64,
          of a block's eight sums the first six are the values', before rounding, added pair by pair

    Where a value of a group is no finite number its scale is NaN, its codes are 0.

    Source: ggml's tiled activation blocks, with scales and sums in f32.
    """
    group, rows = GROUPS[form], x.shape[0]
    groups = pad(x.float(), (0, -x.shape[1] % UNIT)).view(rows, -1, group)
    is_finite = groups.isfinite().all(-1, keepdim=True)
    groups = torch.where(is_finite, groups, 0.0)
    amax = groups.abs().amax(-1, keepdim=True)
    groups = torch.where(amax < SMALLEST, 0.0, groups)
    amax = torch.where(amax < SMALLEST, 0.0, amax)
    scales = torch.where(is_finite, amax / torch.full_like(amax, 127.0), torch.nan)
    inverse = torch.where(amax == 0, 0.0, torch.full_like(amax, 127.0) / amax)
    codes = (groups * inverse).round().to(torch.int8).view(rows, -1)
    of_codes = codes.view(rows, -1, SUM).int().sum(-1).float()
    sums = of_codes * scales.expand(-1, -1, group // SUM).reshape(rows, -1)
    if form == "D2S6":
        of_values = _pairwise_sum(groups.view(rows, -1, SUM))
        within = torch.arange(sums.shape[1], device=x.device) % (UNIT // SUM)
        sums = torch.where(within < SUMS_OF_VALUES, of_values, sums)
    return TiledRows(codes, scales.reshape(rows, -1), sums)


def _pairwise_sum(values: Tensor) -> Tensor:
    """Return the sum over the last axis, a power of two long: neighbours first."""
    while values.shape[-1] > 1:
        values = values[..., 0::2] + values[..., 1::2]
    return values.squeeze(-1)


def dequantise(rows: TiledRows, k: int) -> Tensor:
    """Return the rounded values [T, k] f64, exact."""
    n_rows, n_groups = rows.scales.shape
    codes = rows.codes.view(n_rows, n_groups, -1)
    return (codes.double() * rows.scales.double().unsqueeze(-1)).flatten(1)[:, :k]
