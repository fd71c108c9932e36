"""Q2_K: 256 values in 84 bytes, 16 groups of 16 with a 4-bit scale and a 4-bit minimum each.

| bytes | field | content |
| --- | --- | --- |
| 0-15 | scales | byte g: scale of group g in the low nibble, minimum in the high one |
| 16-79 | qs | value i = 128 h + 32 j + l: bits 2j and 2j+1 of byte 32 h + l |
| 80-81 | d | float16, scale of the scales |
| 82-83 | dmin | float16, scale of the minima |

value i = d * (scales[i / 16] & 15) * q[i] - dmin * (scales[i / 16] >> 4).
Source: ggml block layouts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .affine_search import AffineGrid, fit_affine, shrink_grid
from .block import F16_MAX, apart, as_blocks, by_pieces, read_f16, shifts, write_f16

NAME = "Q2_K"
BLOCK_VALUES = 256
BLOCK_BYTES = 84
LARGEST = F16_MAX * 15 * 3

_GRID = AffineGrid(
    n_groups=16,
    top=3,
    sub_top=15,
    shrinks=shrink_grid(0.1, 0, 2),
    rounds=2,
)


def dequantise(blocks: Tensor) -> Tensor:
    """Values [..., n * 256] f32 of blocks [..., n * 84] u8, exact."""
    block = as_blocks(blocks, BLOCK_BYTES, NAME)
    scales = block[..., :16]
    scale = (read_f16(block[..., 80:82]) * (scales & 15).float()).unsqueeze(-1)
    minimum = (read_f16(block[..., 82:84]) * (scales >> 4).float()).unsqueeze(-1)
    packed = apart(block[..., 16:80], 2, 1, 32)
    q = (packed >> shifts(0, 2, 4, 6, device=blocks.device)) & 3
    q = apart(q.flatten(-3), 16, 16).float()
    return (scale * q - minimum).flatten(-3)


def quantise(values: Tensor) -> Tensor:
    """Blocks [..., n * 84] u8 of values [..., n * 256], searched for least squared error."""
    return by_pieces(values, BLOCK_VALUES, BLOCK_BYTES, NAME, LARGEST, _encode)


def _encode(values: Tensor) -> Tensor:
    fit = fit_affine(values, _GRID)
    scales = fit.scales | (fit.minima << 4)
    q = apart(fit.q, 2, 4, 32)
    packed = q[:, :, 0] | (q[:, :, 1] << 2) | (q[:, :, 2] << 4) | (q[:, :, 3] << 6)
    return torch.cat([scales, packed.flatten(-2), write_f16(fit.d), write_f16(fit.d_min)], dim=-1)
