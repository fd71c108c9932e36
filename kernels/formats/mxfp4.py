"""MXFP4 as GGUF stores it: 32 values in 17 bytes, one power-of-two scale.

| bytes | field | content |
| --- | --- | --- |
| 0 | e | E8M0 scale 2^(e - 127); 255 is refused |
| 1-16 | qs | byte k: value k in the low nibble, value k + 16 in the high one |

A nibble is an E2M1 code; code 8 reads as +0. The official checkpoint has the same codes and scales
in another order, `from_official` and `to_official` move them. Source: ggml block layouts and the
OCP microscaling formats, version 1.0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import e8m0, fp4
from .block import apart, as_blocks, by_pieces, shifts

NAME = "MXFP4"
BLOCK_VALUES = 32
BLOCK_BYTES = 17
LARGEST = torch.inf

# Twice the E2M1 values, to be multiplied by half the scale: the products never round.
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def dequantise(blocks: Tensor) -> Tensor:
    """Values [..., n * 32] f32 of blocks [..., n * 17] u8, exact.

    Raises ValueError on a scale byte 255.
    """
    block = as_blocks(blocks, BLOCK_BYTES, NAME)
    half = e8m0.decode(block[..., :1]) * 0.5
    doubled = torch.tensor(_DOUBLED, dtype=torch.float32, device=blocks.device)
    return (doubled[_codes(block).int()] * half).flatten(-2)


def quantise(values: Tensor) -> Tensor:
    """Blocks [..., n * 17] u8 of values [..., n * 32], see `fp4.quantise_groups`."""
    return by_pieces(values, BLOCK_VALUES, BLOCK_BYTES, NAME, LARGEST, _encode)


def from_official(packed: Tensor, scales: Tensor) -> Tensor:
    """Blocks [n, k / 32 * 17] u8 of an official matrix [n, k / 2] u8, scales [n, k / 32] u8."""
    pairs = apart(packed, packed.shape[-1] // 16, 16, 1)
    codes = ((pairs >> shifts(0, 4, device=packed.device).T) & 15).flatten(-2)
    return torch.cat([scales.unsqueeze(-1), _pack(codes)], dim=-1).flatten(-2)


def to_official(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The official matrix [n, k / 2] u8 and its scales [n, k / 32] u8 of [n, k / 32 * 17] u8."""
    block = as_blocks(blocks, BLOCK_BYTES, NAME)
    pairs = apart(_codes(block), 16, 2)
    return (pairs[..., 0] | (pairs[..., 1] << 4)).flatten(-2), block[..., 0].contiguous()


def _encode(values: Tensor) -> Tensor:
    codes, scales = fp4.quantise_groups(values)
    return torch.cat([scales, _pack(codes)], dim=-1)


def _codes(block: Tensor) -> Tensor:
    """The E2M1 codes [..., 32] of blocks [..., 17], in order."""
    return ((block[..., None, 1:] >> shifts(0, 4, device=block.device)) & 15).flatten(-2)


def _pack(codes: Tensor) -> Tensor:
    return codes[..., :16] | (codes[..., 16:] << 4)
