"""RMS norm with a plain weight."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Scale rows to unit mean square: y = w * (x * rsqrt(mean(x^2) + eps)).

    x        [..., k] bf16 or f32
    weight   [k] f32, plain (not 1 + w)
    returns  [..., k] `dtype`; all in f32, one cast at the end, after the weight

    Source: model specification, section 2.3.
    """
    v = x.float()
    inverse = torch.rsqrt(v.square().mean(-1, keepdim=True).add_(eps))
    return (weight * (v * inverse)).to(dtype)
