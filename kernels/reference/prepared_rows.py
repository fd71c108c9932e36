"""Rows rounded to fp8 in the order that many rows' experts multiply them in."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .round_fp8 import round_fp8

BLOCK = 128
FACTOR = 2.0**16


def prepared_rows(x: Tensor) -> Tensor:
    """Return [T, ceil(k / 128) * 128] bf16 of x [T, k]: 2^16 ROUND_FP8(x), reordered by block.

    Channel 32 q + 8 i + c of a block goes to 16 c + 8 (i / 2) + 2 q + i % 2.
    Source: model specification, section 2.2, ROUND_FP8.
    """
    rounded = pad(round_fp8(x), (0, -x.shape[1] % BLOCK)) * FACTOR
    parts = rounded.view(x.shape[0], -1, 4, 2, 2, 8)  # token, block, q, i / 2, i % 2, c
    return parts.permute(0, 1, 5, 3, 2, 4).reshape(x.shape[0], -1).to(torch.bfloat16)
