"""A router's logits: products added strictly one after another."""

from __future__ import annotations

import torch
from torch import Tensor

_FEW_TOKENS = 4  # up to here an expert at a time is quicker than all experts a channel at a time
_VALUES = 1 << 15  # partial sums that stay in a core's cache


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Return x . weight^T [T, E] f32, each value one chain: ((0 + x0 w0) + x1 w1) + ...

    x       [T, H] f32 or bf16
    weight  [E, H] bf16 or f32

    A product is rounded to f32, then added, in ascending order of the channel. The chain begins at
    +0, so that negative zeros alone give +0. A token's bits do not depend on the others.
    Source: model specification, section 4.3, router detail; the temperature is always 1.
    """
    x = x.float()
    few = x.shape[0] <= _FEW_TOKENS
    return _by_expert(x, weight) if few else _by_channel(x, weight.float())


def _by_expert(x: Tensor, weight: Tensor) -> Tensor:
    """Sum by an array's running sums: each is the one before plus one value, where torch's are of
    f64.
    """
    n_experts, width = weight.shape
    out = torch.zeros((x.shape[0], n_experts), dtype=torch.float32)
    step = max(1, _VALUES // max(1, width))
    for first in range(0, n_experts if width else 0, step):
        rows = weight[first : first + step].float()
        for token, row in enumerate(x):
            sums = rows * row
            running = sums.numpy()
            running.cumsum(axis=1, out=running)
            out[token, first : first + step] += sums[:, -1]
    return out


def _by_channel(x: Tensor, weight: Tensor) -> Tensor:
    """Add each channel's products of some tokens and all experts at once."""
    out = torch.zeros((x.shape[0], weight.shape[0]), dtype=torch.float32)
    channels = weight.t().contiguous()
    step = max(1, _VALUES // max(1, weight.shape[0]))
    for first in range(0, x.shape[0], step):
        sums = out[first : first + step]
        products = torch.empty_like(sums)
        tokens = x[first : first + step].t().contiguous().unsqueeze(2)
        for token, channel in zip(tokens, channels, strict=True):
            torch.mul(token, channel, out=products)
            sums += products
    return out
