"""Q5_K: 256 values in 176 bytes, 8 groups of 32 with a 6-bit scale and a 6-bit minimum each.

| bytes | field | content |
| --- | --- | --- |
| 0-1 | d | float16, scale of the scales |
| 2-3 | dmin | float16, scale of the minima |
| 4-15 | scales | eight scales and eight minima of six bits, see `k_scales` |
| 16-47 | qh | value i = 32 g + l: bit g of byte l, the fifth bit of q |
| 48-175 | qs | value i = 64 h + 32 j + l: nibble j (low first) of byte 32 h + l |

value i = d * scale[i / 32] * q[i] - dmin * minimum[i / 32]. Source: ggml block layouts.
"""

from __future__ import annotations

from torch import Tensor

from . import k_scales
from .block import apart, as_blocks, read_f16, shifts

NAME = "Q5_K"
BLOCK_VALUES = 256
BLOCK_BYTES = 176


def dequantise(blocks: Tensor) -> Tensor:
    """Values [..., n * 256] f32 of blocks [..., n * 176] u8, exact."""
    block = as_blocks(blocks, BLOCK_BYTES, NAME)
    device = blocks.device
    scales, minima = k_scales.unpack(block[..., 4:16])
    scale = (read_f16(block[..., :2]) * scales.float()).unsqueeze(-1)
    minimum = (read_f16(block[..., 2:4]) * minima.float()).unsqueeze(-1)
    low = (apart(block[..., 48:], 4, 1, 32) >> shifts(0, 4, device=device)) & 15
    fifth = (block[..., 16:48].unsqueeze(-2) >> shifts(*range(8), device=device)) & 1
    q = low.flatten(-3, -2) | (fifth << 4)
    return (scale * q.float() - minimum).flatten(-3)
