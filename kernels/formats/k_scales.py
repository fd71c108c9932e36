"""The 12 bytes that hold eight 6-bit scales and eight 6-bit minima in Q4_K and Q5_K.

| bytes | content, k = 0..3 |
| --- | --- |
| k | scale k in bits 0-5; bits 4-5 of scale k + 4 in bits 6-7 |
| 4 + k | minimum k in bits 0-5; bits 4-5 of minimum k + 4 in bits 6-7 |
| 8 + k | bits 0-3 of scale k + 4 in the low nibble, of minimum k + 4 in the high one |
"""

from __future__ import annotations

import torch
from torch import Tensor


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima, each [..., 8] u8, of packed [..., 12] u8."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], dim=-1)
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], dim=-1)
    return scales, minima


def pack(scales: Tensor, minima: Tensor) -> Tensor:
    """The packed [..., 12] u8 of scales and minima, each [..., 8] u8 below 64."""
    first = scales[..., :4] | ((scales[..., 4:] >> 4) << 6)
    second = minima[..., :4] | ((minima[..., 4:] >> 4) << 6)
    third = (scales[..., 4:] & 15) | ((minima[..., 4:] & 15) << 4)
    return torch.cat([first, second, third], dim=-1)
