"""The id of the largest logit."""

from __future__ import annotations

import torch
from torch import Tensor


def likeliest(logits: Tensor) -> Tensor:
    """Return [2] i64 of logits [vocab] f32: the lowest id of the largest, 1 where one is NaN.

    NaN counts as the largest.
    """
    is_nan = logits.isnan()
    ranked = logits.masked_fill(is_nan, torch.inf) if bool(is_nan.any()) else logits
    if bool(is_nan.any()):
        return torch.stack([is_nan.int().argmax(), torch.ones((), dtype=torch.int64)])
    best = (ranked == ranked.max()).int().argmax()
    return torch.stack([best, torch.zeros((), dtype=torch.int64)])
