"""The experts of each token and their weights."""

from __future__ import annotations

import torch
from torch import Tensor

from .softplus_sqrt import softplus_sqrt

SUM_FLOOR = 1e-20  # added to the sum of the picked scores


def route_select(
    logits: Tensor, bias: Tensor, top_k: int, routed_scale: float
) -> tuple[Tensor, Tensor]:
    """Pick experts by biased score and weigh them by the plain one.

    logits   [T, E] f32
    bias     [E] f32, for the choice alone
    returns  picks [T, top_k] int64 in order of rank, weights [T, top_k] f32

    score = sqrt(softplus(logit)); rank by score + bias, the lower id on equality, NaN last;
    weight = score / (sum of the picked scores + 1e-20) * routed_scale. The sum is taken one by one
    in order of rank: that order decides bits.
    Source: model specification, sections 3.7 and 4.3.
    """
    scores = softplus_sqrt(logits)
    ranked = rank_keys(scores + bias)
    picks = ranked.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    chosen = scores.gather(1, picks)
    total = chosen[:, 0].clone()
    for rank in range(1, top_k):
        total += chosen[:, rank]
    return picks, (chosen / (total + SUM_FLOOR).unsqueeze(1)) * routed_scale


def rank_keys(values: Tensor) -> Tensor:
    """Return integers i32 that order as the f32 values do, the two zeros equal, NaN the least."""
    bits = (values + 0.0).view(torch.int32)  # no negative zero
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return keys.masked_fill_(values.isnan(), torch.iinfo(torch.int32).min)
