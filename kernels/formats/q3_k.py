"""Q3_K: 256 values in 110 bytes, 16 groups of 16 with a signed 6-bit scale each.

| bytes | field | content |
| --- | --- | --- |
| 0-31 | hmask | value i = 128 h + 32 j + l: bit 4 h + j of byte l, the third bit of q |
| 32-95 | qs | value i: bits 2j and 2j+1 of byte 32 h + l, the low two bits of q |
| 96-103 | scales | byte k: the low four bits of scales k (low nibble) and k + 8 (high nibble) |
| 104-107 | scales | byte k mod 4: the high two bits of scale k at bits 2 (k / 4) and up |
| 108-109 | d | float16 |

value i = d * (scale[i / 16] - 32) * (q[i] - 4). Source: ggml block layouts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .block import F16_MAX, apart, as_blocks, by_pieces, read_f16, shifts, write_f16
from .symmetric_search import SymmetricGrid, fit_symmetric

NAME = "Q3_K"
BLOCK_VALUES = 256
BLOCK_BYTES = 110
LARGEST = F16_MAX * 32 * 4

_GRID = SymmetricGrid(
    n_groups=16,
    half=4,
    sub_half=32,
    stretches=(-0.5, -0.25, 0.0, 0.25, 0.5),
    rounds=2,
)


def dequantise(blocks: Tensor) -> Tensor:
    """Values [..., n * 256] f32 of blocks [..., n * 110] u8, exact."""
    block = as_blocks(blocks, BLOCK_BYTES, NAME)
    device = blocks.device
    low = (block[..., 96:104].unsqueeze(-2) >> shifts(0, 4, device=device)) & 15
    high = (block[..., 104:108].unsqueeze(-2) >> shifts(0, 2, 4, 6, device=device)) & 3
    scales = (low.flatten(-2) | (high.flatten(-2) << 4)).to(torch.int8) - 32
    scale = (read_f16(block[..., 108:110]) * scales.float()).unsqueeze(-1)
    packed = apart(block[..., 32:96], 2, 1, 32)
    q = (packed >> shifts(0, 2, 4, 6, device=device)) & 3
    third = (block[..., :32].unsqueeze(-2) >> shifts(*range(8), device=device)) & 1
    q = q.flatten(-3) | (third.flatten(-2) << 2)
    q = apart((q.to(torch.int8) - 4), 16, 16).float()
    return (scale * q).flatten(-3)


def quantise(values: Tensor) -> Tensor:
    """Blocks [..., n * 110] u8 of values [..., n * 256], searched for least squared error."""
    return by_pieces(values, BLOCK_VALUES, BLOCK_BYTES, NAME, LARGEST, _encode)


def _encode(values: Tensor) -> Tensor:
    fit = fit_symmetric(values, _GRID)
    scales = (fit.scales + 32).to(torch.uint8)
    low = (scales[:, :8] & 15) | ((scales[:, 8:] & 15) << 4)
    top = apart((scales >> 4), 4, 4)
    high = top[:, 0] | (top[:, 1] << 2) | (top[:, 2] << 4) | (top[:, 3] << 6)
    q = (fit.q + 4).to(torch.uint8)
    third = apart((q >> 2), 8, 32) << shifts(*range(8), device=q.device)
    mask = third[:, 0]
    for plane in range(1, 8):
        mask = mask | third[:, plane]
    q = apart((q & 3), 2, 4, 32)
    packed = q[:, :, 0] | (q[:, :, 1] << 2) | (q[:, :, 2] << 4) | (q[:, :, 3] << 6)
    return torch.cat([mask, packed.flatten(-2), low, high, write_f16(fit.d)], dim=-1)
