"""F16: one value in 2 bytes, a little-endian float16."""

from __future__ import annotations

import torch
from torch import Tensor

from .block import as_blocks, read_as

NAME = "F16"
BLOCK_VALUES = 1
BLOCK_BYTES = 2


def dequantise(blocks: Tensor) -> Tensor:
    """Values [..., n] f32 of bytes [..., n * 2] u8, exact."""
    return read_as(as_blocks(blocks, BLOCK_BYTES, NAME), torch.float16).float().squeeze(-1)


def quantise(values: Tensor) -> Tensor:
    """Bytes [..., n * 2] u8 of values [..., n], each the nearest float16, halves to even."""
    return values.to(torch.float16).unsqueeze(-1).view(torch.uint8).flatten(-2)
