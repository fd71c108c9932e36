"""The coefficients that one sublayer mixes the residual streams with."""

from __future__ import annotations

import torch
from torch import Tensor

from .linear import linear


def hc_mix(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    n_iterations: int,
    hc_eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Project the streams to (pre, post, comb); comb is made doubly stochastic.

    streams  [T, S, H] bf16 or f32
    fn       [S * (S + 2), S * H] f32
    scale    [S * (S + 2)] f32, one a coefficient: pre's, post's and comb's, repeated
    base     [S * (S + 2)] f32
    returns  pre [T, S], post [T, S], comb [T, S, S], all f32

    v = streams flattened; m = (v . fn^T) * rsqrt(mean(v^2) + norm_eps);
    then c = m * scale + base is cut into pre, post and comb (rows first):
    pre = sigmoid(c) + hc_eps; post = 2 sigmoid(c); comb = c made doubly stochastic by `_balance`.
    Source: model specification, section 3.1.
    """
    n = streams.shape[1]
    v = streams.float().flatten(1)
    m = linear(v, fn, torch.float32) * torch.rsqrt(v.square().mean(-1, keepdim=True).add_(norm_eps))
    m = m * scale + base
    both = torch.sigmoid(m[:, : 2 * n])
    comb = _balance(torch.unflatten(m[:, 2 * n :], 1, (n, n)), n_iterations, hc_eps)
    return both[:, :n] + hc_eps, 2 * both[:, n:], comb


def _balance(c: Tensor, n_iterations: int, eps: float) -> Tensor:
    """Softmax over rows [T, S, S], then divide by row and column sums in turn; ends on columns.

    The first column pass counts as the first iteration.
    """
    c = c.softmax(2) + eps
    c = c / (c.sum(1, keepdim=True) + eps)
    for _ in range(n_iterations - 1):
        c = c / (c.sum(2, keepdim=True) + eps)
        c = c / (c.sum(1, keepdim=True) + eps)
    return c
