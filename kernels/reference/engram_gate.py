"""How much of an Engram value each residual stream takes."""

from __future__ import annotations

import torch
from torch import Tensor

from .fill_rows import fill_columns

_LEAST_DOT = 1e-6


def engram_gate(streams: Tensor, keys: Tensor, value: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add the value to each stream, gated by how the stream agrees with its key.

    streams  [T, S, H] bf16 or f32
    keys     [T, S, H] f32
    value    [T, H] f32
    weight   [S, H] f32, the product of query and key weights
    returns  [T, S, H], dtype of streams

    dot = sum of h * weight * key * rsqrt(mean(h^2) + eps) * rsqrt(mean(key^2) + eps) * H^-0.5;
    h + sigmoid(copysign(sqrt(max(|dot|, 1e-6)), dot)) * value; statistics are per stream, in f32.
    Source: model specification, section 3.2, Update.
    """
    h = streams.float()
    dot = (h * weight * keys).sum(-1)
    dot = dot * torch.rsqrt(h.square().mean(-1) + eps) * torch.rsqrt(keys.square().mean(-1) + eps)
    dot = dot * h.shape[-1] ** -0.5
    root = torch.copysign(dot.abs().clamp_min(_LEAST_DOT).sqrt(), dot)
    gate = torch.sigmoid(fill_columns(root))[:, : dot.shape[1]]
    return (h + gate.unsqueeze(-1) * value.unsqueeze(1)).to(streams.dtype)
