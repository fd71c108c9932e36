"""Q8_0: 32 values in 34 bytes, one scale.

| bytes | field | content |
| --- | --- | --- |
| 0-1 | d | float16, little endian |
| 2-33 | q | 32 signed bytes, in order |

value i = d * q[i]. Source: ggml block layouts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .block import F16_MAX, as_blocks, by_pieces, divide, read_f16, write_f16

NAME = "Q8_0"
BLOCK_VALUES = 32
BLOCK_BYTES = 34
LARGEST = F16_MAX * 127


def dequantise(blocks: Tensor) -> Tensor:
    """Values [..., n * 32] f32 of blocks [..., n * 34] u8, exact."""
    block = as_blocks(blocks, BLOCK_BYTES, NAME)
    d = read_f16(block[..., :2])
    q = block[..., 2:].contiguous().view(torch.int8)
    return (q.float() * d).flatten(-2)


def quantise(values: Tensor) -> Tensor:
    """Blocks [..., n * 34] u8 of values [..., n * 32]: the largest magnitude maps to 127.

    Halves round away from zero, as the reference quantiser of the format does.
    """
    return by_pieces(values, BLOCK_VALUES, BLOCK_BYTES, NAME, LARGEST, _encode)


def _encode(values: Tensor) -> Tensor:
    d = divide(values.abs().amax(-1, keepdim=True), 127).clamp(max=F16_MAX)
    inverse = torch.where(d == 0, torch.zeros_like(d), 1 / d)
    scaled = values * inverse
    magnitude = scaled.abs()
    whole = magnitude.floor()
    # floor(m + 0.5) would round 0.49999997 up; the fraction is exact, so compare it instead.
    whole = (whole + (magnitude - whole >= 0.5)).clamp(max=127)
    q = torch.copysign(whole, scaled).to(torch.int8)
    return torch.cat([write_f16(d.squeeze(-1)), q.view(torch.uint8)], dim=-1)
