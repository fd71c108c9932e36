"""A chunk's picks as pairs of token and expert, sorted by expert, then token."""

from __future__ import annotations

import torch
from torch import Tensor


def plan_pairs(
    picks: Tensor, weights: Tensor, n_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens [T * K] i32 and weights [T * K] f32 of the pairs, places [T, K] i32 of each
    token's pairs among them, counts [n_experts] i32.

    picks [T, K] i32, weights [T, K] f32.
    """
    flat = picks.flatten().long()
    order = flat.argsort(stable=True)
    places = torch.empty_like(order, dtype=torch.int32)
    places[order] = torch.arange(len(order), dtype=torch.int32, device=order.device)
    counts = torch.zeros(n_experts, dtype=torch.int32, device=order.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    tokens = (order // picks.shape[1]).int()
    return tokens, weights.flatten()[order], places.view(picks.shape), counts
