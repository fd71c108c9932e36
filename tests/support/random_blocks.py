"""Blocks of any bytes in a GGUF format, with scales that are numbers of either sign."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.formats import FORMATS

# Where float16 scales stand in a block.
SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q6_K": (208,), "Q8_0": (0,)}


def random_blocks(name: str, n: int, k: int, seed: int = 0, largest: float = 0.5) -> Tensor:
    """Return a matrix [n, bytes of k values] u8, its blocks' scales at most `largest`."""
    generator = torch.Generator().manual_seed(seed + n + k)
    block = FORMATS[name]
    shape = (n, k // block.BLOCK_VALUES, block.BLOCK_BYTES)
    data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    for start in SCALES[name]:
        scale = (2 * largest * (torch.rand(*shape[:2], 1, generator=generator) - 0.5)).half()
        data[..., start : start + 2] = scale.view(torch.uint8)
    return data.view(n, -1)
