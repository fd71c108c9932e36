"""IQ2_XXS: 256 values in 66 bytes, 8 groups of 32 made of four patterns of 8; read only.

| bytes | field | content |
| --- | --- | --- |
| 0-1 | d | float16 |
| 2 + 8g .. 5 + 8g | patterns | group g: byte p is the table row of values 8p .. 8p + 7 |
| 6 + 8g .. 9 + 8g | word | bits 7p..7p+6: signs of pattern p; bits 28-31: the group's scale |

Seven sign bits say which of a pattern's first seven values are negative; the eighth is negative
when their number is odd. value = d * (scale + 1/2) / 4 * pattern * sign. Source: ggml block
layouts; the pattern table is `iq2xxs_grid` of ggml-common.h (MIT licence).
"""

from __future__ import annotations

import base64
from functools import cache

import torch
from torch import Tensor

from .block import apart, as_blocks, read_as, read_f16, shifts

NAME = "IQ2_XXS"
BLOCK_VALUES = 256
BLOCK_BYTES = 66

# A pattern's eight magnitudes are digits, least significant first, of a number in base three; the
# table ascends in that number, so it is stored as half the steps from row to row (all even).
_MAGNITUDES = (8, 25, 43)
_HALF_STEPS = (
    "AAEBAQEBAQMBAgEBAQMDAgEDAQMGBAEDAgcPBgYBCRINAQMFAQMBAgYFAQMGAwECBgcKAQUMAQkPCQMCAQMGAgED"
    "AQsMDBwFIwEDBQQJBgMCBwMGCQQFGAUZAwYCBgoVEBEHIgEDCQ4NAiIXFgEDCwgEARkEGAEoAQMJBxQOCjAMBhg/"
    "GgEDAwIBAwMEAgUBAwkJDgQCDAQMBAUPAwYSCAsFHikBAwkCGRUCBRwQCQMCAwESAwwNFyMoAQwlExUFAxAeHicD"
    "CQwPFBwPEgIrARdDawEDCg4OBgYgJAEDAgcJEhARCwoJEyksJQMGAxcLFB0ZCgUsWhZJEQsPJTCEGA=="
)


@cache
def _patterns(device: torch.device) -> Tensor:
    """The pattern table [256, 8] f32."""
    steps = torch.tensor(list(base64.b64decode(_HALF_STEPS)), dtype=torch.int32, device=device)
    number = (2 * steps).cumsum(0).unsqueeze(-1)
    digit = number // 3 ** torch.arange(8, device=device) % 3
    return torch.tensor(_MAGNITUDES, dtype=torch.float32, device=device)[digit]


def dequantise(blocks: Tensor) -> Tensor:
    """Values [..., n * 256] f32 of blocks [..., n * 66] u8, exact."""
    block = as_blocks(blocks, BLOCK_BYTES, NAME)
    groups = apart(block[..., 2:], 8, 8)
    pattern = _patterns(blocks.device)[groups[..., :4].int()]
    word = read_as(groups[..., 4:], torch.int32)
    scale = ((word >> 28) & 15).float()
    unit = read_f16(block[..., :2]).unsqueeze(-2) * (scale + 0.5) * 0.25
    negative = _negative(word)
    return (unit.unsqueeze(-1) * pattern * (1 - 2 * negative.float())).flatten(-4)


def _negative(word: Tensor) -> Tensor:
    """Which values are negative, [..., 4, 8] u8 of 0 and 1, of words [..., 1] i32."""
    seven = (word >> torch.tensor((0, 7, 14, 21), dtype=torch.int32, device=word.device)) & 127
    bits = (seven.to(torch.uint8).unsqueeze(-1) >> shifts(*range(7), device=word.device).T) & 1
    odd = bits.sum(-1, keepdim=True, dtype=torch.uint8) & 1
    return torch.cat([bits, odd], dim=-1)
