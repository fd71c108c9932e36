"""The gated activation of an expert."""

from __future__ import annotations

import torch
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


def routed_swiglu(gate: Tensor, up: Tensor, limit: float, weight: Tensor | None) -> Tensor:
    """As `swiglu`; NaN where gate or up is no finite number.

    Sums of a routed expert that are none come of a scale or an input that nobody meant: clamped
    they would be numbers.
    """
    is_finite = gate.isfinite() & up.isfinite()
    return torch.where(is_finite, swiglu(gate, up, limit, weight), torch.nan)
