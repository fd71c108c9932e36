"""A stored fp8 matrix as bf16."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.formats import fp8


def fp8_to_bf16(codes: Tensor, scales: Tensor) -> Tensor:
    """Dequantise a matrix with one scale for each 32 x 32 tile, and round it to bf16.

    codes    [n, k] u8 E4M3
    scales   [ceil(n / 32), ceil(k / 32)] u8 E8M0
    returns  [n, k] bf16

    Raises ValueError on scale byte 255. Source: model specification, sections 2.1 and 6.
    """
    return fp8.dequantise_tiles(codes, scales).to(torch.bfloat16)
