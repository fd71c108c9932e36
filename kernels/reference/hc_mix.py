"""The coefficients that one sublayer mixes the residual streams with."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .fill_rows import fill_rows
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
    m = torch.addcmul(base, m, scale)
    both = torch.sigmoid(m[:, : 2 * n])
    comb = _balance(m[:, 2 * n :], n, n_iterations, hc_eps)
    return both[:, :n] + hc_eps, 2 * both[:, n:], comb


def _balance(c: Tensor, n: int, n_iterations: int, eps: float) -> Tensor:
    """Softmax over rows, then divide by row and column sums in turn; ends on columns.

    The first column pass counts as the first iteration. A pass is one product: entry b gets the sum
    of the entries of its row (or column), plus eps; the zeros of the pattern add nothing.
    """
    same_row, same_column, epsilon = _patterns(n, eps, c.device)
    n_tokens = c.shape[0]
    c = fill_rows(c.reshape(-1, n, n).softmax(-1).view(-1, n * n) + eps)
    c = c / torch.addmm(epsilon, c, same_column)
    for _ in range(n_iterations - 1):
        c = c / torch.addmm(epsilon, c, same_row)
        c = c / torch.addmm(epsilon, c, same_column)
    return c.view(-1, n, n)[:n_tokens]


@lru_cache(maxsize=16)
def _patterns(n: int, eps: float, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """[n * n, n * n] ones where two entries share a row, where they share a column, and eps."""
    entry = torch.arange(n * n)
    same_row = (entry[:, None] // n == entry[None] // n).float()
    same_column = (entry[:, None] % n == entry[None] % n).float()
    epsilon = torch.full((n * n,), eps)
    return same_row.to(device), same_column.to(device), epsilon.to(device)
