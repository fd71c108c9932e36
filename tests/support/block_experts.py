"""Experts of GGUF blocks in slots, as kernels are given them."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.formats.k_expert import BlockShape
from tests.support.random_blocks import random_blocks


def experts_of(
    shape: BlockShape, n_experts: int, device: str, largest: float = 0.003
) -> tuple[Tensor, Tensor]:
    """Return slots [n, bytes] u8, pieces at multiples of 256, and the pointers [3, n] into them."""
    pieces = [(shape.gate, shape.width, shape.hidden), (shape.up, shape.width, shape.hidden)]
    pieces.append((shape.down, shape.hidden, shape.width))
    slots, starts = [], [0]
    for expert in range(n_experts):
        parts = []
        for number, (name, n, k) in enumerate(pieces):
            data = random_blocks(name, n, k, 7 * expert + number, largest).flatten()
            parts.append(torch.cat([data, torch.zeros(-len(data) % 256, dtype=torch.uint8)]))
        slots.append(torch.cat(parts))
        starts = [0, len(parts[0]), len(parts[0]) + len(parts[1])]
    stacked = torch.stack(slots).to(device)
    first = stacked.data_ptr() + torch.arange(n_experts) * stacked.shape[1]
    return stacked, torch.stack([first + start for start in starts]).to(device)
