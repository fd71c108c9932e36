"""Q4_K: 256 values in 144 bytes, 8 groups of 32 with a 6-bit scale and a 6-bit minimum each.

| bytes | field | content |
| --- | --- | --- |
| 0-1 | d | float16, scale of the scales |
| 2-3 | dmin | float16, scale of the minima |
| 4-15 | scales | eight scales and eight minima of six bits, see `k_scales` |
| 16-143 | qs | value i = 64 h + 32 j + l: nibble j (low first) of byte 32 h + l |

value i = d * scale[i / 32] * q[i] - dmin * minimum[i / 32]. Source: ggml block layouts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import k_scales
from .affine_search import AffineGrid, fit_affine, shrink_grid
from .block import F16_MAX, apart, as_blocks, by_pieces, read_f16, shifts, write_f16

NAME = "Q4_K"
BLOCK_VALUES = 256
BLOCK_BYTES = 144
LARGEST = F16_MAX * 63 * 15

_GRID = AffineGrid(
    n_groups=8,
    top=15,
    sub_top=63,
    shrinks=shrink_grid(0.03, -1, 2),
    rounds=1,
)


def dequantise(blocks: Tensor) -> Tensor:
    """Values [..., n * 256] f32 of blocks [..., n * 144] u8, exact."""
    block = as_blocks(blocks, BLOCK_BYTES, NAME)
    scales, minima = k_scales.unpack(block[..., 4:16])
    scale = (read_f16(block[..., :2]) * scales.float()).unsqueeze(-1)
    minimum = (read_f16(block[..., 2:4]) * minima.float()).unsqueeze(-1)
    packed = apart(block[..., 16:], 4, 1, 32)
    q = (packed >> shifts(0, 4, device=blocks.device)) & 15
    return (scale * q.flatten(-3, -2).float() - minimum).flatten(-3)


def quantise(values: Tensor) -> Tensor:
    """Blocks [..., n * 144] u8 of values [..., n * 256], searched for least squared error."""
    return by_pieces(values, BLOCK_VALUES, BLOCK_BYTES, NAME, LARGEST, _encode)


def _encode(values: Tensor) -> Tensor:
    fit = fit_affine(values, _GRID)
    q = apart(fit.q, 4, 2, 32)
    packed = q[:, :, 0] | (q[:, :, 1] << 4)
    scales = k_scales.pack(fit.scales, fit.minima)
    return torch.cat([write_f16(fit.d), write_f16(fit.d_min), scales, packed.flatten(-2)], dim=-1)
