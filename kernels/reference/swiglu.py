"""The gated activation of an expert."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu


def swiglu(gate: Tensor, up: Tensor, limit: float, weight: Tensor | None) -> Tensor:
    """Gate the up projection: silu(min(gate, limit)) * clamp(up, -limit, limit) * weight.

    gate     [T, k] bf16 or f32, clamped above only
    up       [T, k] bf16 or f32
    weight   [T] f32 routing weights, None for the shared expert; they act before the down
             projection and before its input is rounded
    returns  [T, k] f32

    Source: model specification, section 3.7, Expert.
    """
    activated = silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)
    return activated if weight is None else weight.unsqueeze(1) * activated
