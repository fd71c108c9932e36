"""F32: one value in 4 bytes, a little-endian float32."""

from __future__ import annotations

import torch
from torch import Tensor

from .block import as_blocks, read_as

NAME = "F32"
BLOCK_VALUES = 1
BLOCK_BYTES = 4


def dequantise(blocks: Tensor) -> Tensor:
    """Values [..., n] f32 of bytes [..., n * 4] u8, exact; the same memory where it can be."""
    return read_as(as_blocks(blocks, BLOCK_BYTES, NAME), torch.float32).float().squeeze(-1)


def quantise(values: Tensor) -> Tensor:
    """Bytes [..., n * 4] u8 of values [..., n], each the nearest float32, halves to even."""
    return values.to(torch.float32).unsqueeze(-1).view(torch.uint8).flatten(-2)
