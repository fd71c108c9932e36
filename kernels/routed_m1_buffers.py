"""What `routed_m1` writes on its way, made once so that a step allocates nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .byte_planes import Planes, empty_planes
from .formats.fp4_expert import Fp4Shape


@dataclass(frozen=True, slots=True)
class RoutedBuffers:
    """Scratch of one call at a time, for up to `parts.shape[0]` experts, and the result."""

    row: Planes  # the token's row, one
    activated: Tensor  # [K, width] f32, between the products
    activated_row: Planes  # the same, rounded, K rows
    parts: Tensor  # [K, hidden] f32, each expert's output
    out: Tensor  # [hidden] f32

    @classmethod
    def new(cls, shape: Fp4Shape, top_k: int, device: torch.device | str) -> RoutedBuffers:
        """Return unwritten buffers for experts of `shape`, `top_k` of them at most."""
        device = torch.device(device)
        return cls(
            row=empty_planes(1, shape.hidden, device),
            activated=torch.empty((top_k, shape.width), dtype=torch.float32, device=device),
            activated_row=empty_planes(top_k, shape.width, device),
            parts=torch.empty((top_k, shape.hidden), dtype=torch.float32, device=device),
            out=torch.empty(shape.hidden, dtype=torch.float32, device=device),
        )

    def first(self, n_experts: int) -> RoutedBuffers:
        """Return views for the first `n_experts` experts."""
        planes, offsets, scales = self.activated_row
        return RoutedBuffers(
            row=self.row,
            activated=self.activated[:n_experts],
            activated_row=(planes[:n_experts], offsets[:n_experts], scales[:n_experts]),
            parts=self.parts[:n_experts],
            out=self.out,
        )
