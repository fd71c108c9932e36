"""How well each compressed row fits a query, by the indexer."""

from __future__ import annotations

from torch import Tensor

from .fill_rows import fill_rows


def index_scores(queries: Tensor, keys: Tensor, head_weights: Tensor) -> Tensor:
    """Score rows: score[t, g] = sum over heads of hw[t, h] * relu(iq[t, h] . key[g]).

    queries       [T, heads, k] f32
    keys          [G, k] bf16 or f32
    head_weights  [T, heads] bf16 or f32: its dtype is that of every step
    returns       [T, G] f32

    In bf16 each of product, relu, weighting and head sum is rounded, so exact ties are common.
    Source: model specification, section 3.5.
    """
    dtype = head_weights.dtype
    n_tokens, n_heads, _ = queries.shape
    products = fill_rows(queries.flatten(0, 1)) @ keys.float().T
    products = products[: n_tokens * n_heads].to(dtype).view(n_tokens, n_heads, -1).relu_()
    weighted = (products * head_weights.unsqueeze(-1)).float()
    return weighted.sum(1).to(dtype).float()
