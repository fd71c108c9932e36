"""What `routed_m1` writes on its way, made once so that a step allocates nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .byte_planes import empty_planes
from .formats.fp4_expert import Fp4Shape
from .formats.k_expert import BlockShape
from .q8_1_rows import empty_rows

Rounded = tuple[Tensor, ...]  # byte planes for fp4 experts, q8_1 rows for blocks


@dataclass(frozen=True, slots=True)
class RoutedBuffers:
    """Scratch of one call at a time, for up to `parts.shape[0]` experts, and the result."""

    row: Rounded  # the token's row, one
    activated: Tensor  # [K, width] f32, between the products
    activated_row: Rounded  # the same, rounded, K rows
    parts: Tensor  # [K, hidden] f32, each expert's output
    out: Tensor  # [hidden] f32

    @classmethod
    def new(
        cls, shape: Fp4Shape | BlockShape, top_k: int, device: torch.device | str
    ) -> RoutedBuffers:
        """Return unwritten buffers for experts of `shape`, `top_k` of them at most."""
        device = torch.device(device)
        empty: Callable[[int, int, torch.device], Rounded] = (
            empty_planes if isinstance(shape, Fp4Shape) else empty_rows
        )
        return cls(
            row=empty(1, shape.hidden, device),
            activated=torch.empty((top_k, shape.width), dtype=torch.float32, device=device),
            activated_row=empty(top_k, shape.width, device),
            parts=torch.empty((top_k, shape.hidden), dtype=torch.float32, device=device),
            out=torch.empty(shape.hidden, dtype=torch.float32, device=device),
        )

    def first(self, n_experts: int) -> RoutedBuffers:
        """Return views for the first `n_experts` experts."""
        return RoutedBuffers(
            row=self.row,
            activated=self.activated[:n_experts],
            activated_row=tuple(part[:n_experts] for part in self.activated_row),
            parts=self.parts[:n_experts],
            out=self.out,
        )
