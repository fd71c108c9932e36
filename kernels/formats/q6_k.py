"""Q6_K: 256 values in 210 bytes, 16 groups of 16 with a signed 8-bit scale each.

| bytes | field | content |
| --- | --- | --- |
| 0-127 | ql | value i = 128 h + 64 j + l: nibble j (low first) of byte 64 h + l |
| 128-191 | qh | value i = 128 h + 32 j + l: bits 2j and 2j+1 of byte 32 h + l, the high bits of q |
| 192-207 | scales | signed byte g: scale of group g |
| 208-209 | d | float16 |

value i = d * scale[i / 16] * (q[i] - 32). Source: ggml block layouts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .block import F16_MAX, apart, as_blocks, by_pieces, read_f16, shifts, write_f16
from .symmetric_search import SymmetricGrid, fit_symmetric

NAME = "Q6_K"
BLOCK_VALUES = 256
BLOCK_BYTES = 210
LARGEST = F16_MAX * 128 * 32

_GRID = SymmetricGrid(
    n_groups=16,
    half=32,
    sub_half=128,
    stretches=(-1.2, -0.9, -0.6, -0.3, 0.0, 0.3, 0.6, 0.9),
    rounds=1,
)


def dequantise(blocks: Tensor) -> Tensor:
    """Values [..., n * 256] f32 of blocks [..., n * 210] u8, exact."""
    block = as_blocks(blocks, BLOCK_BYTES, NAME)
    device = blocks.device
    scales = block[..., 192:208].contiguous().view(torch.int8).float()
    scale = (read_f16(block[..., 208:210]) * scales).unsqueeze(-1)
    low = (apart(block[..., :128], 2, 1, 64) >> shifts(0, 4, device=device)) & 15
    high = (apart(block[..., 128:192], 2, 1, 32) >> shifts(0, 2, 4, 6, device=device)) & 3
    q = low.flatten(-3) | (high.flatten(-3) << 4)
    q = apart((q.to(torch.int8) - 32), 16, 16).float()
    return (scale * q).flatten(-3)


def quantise(values: Tensor) -> Tensor:
    """Blocks [..., n * 210] u8 of values [..., n * 256], searched for least squared error."""
    return by_pieces(values, BLOCK_VALUES, BLOCK_BYTES, NAME, LARGEST, _encode)


def _encode(values: Tensor) -> Tensor:
    fit = fit_symmetric(values, _GRID)
    q = (fit.q + 32).to(torch.uint8)
    low = apart((q & 15), 2, 2, 64)
    low = low[:, :, 0] | (low[:, :, 1] << 4)
    top = apart((q >> 4), 2, 4, 32)
    high = top[:, :, 0] | (top[:, :, 1] << 2) | (top[:, :, 2] << 4) | (top[:, :, 3] << 6)
    scales = fit.scales.to(torch.int8).view(torch.uint8)
    return torch.cat([low.flatten(-2), high.flatten(-2), scales, write_f16(fit.d)], dim=-1)
