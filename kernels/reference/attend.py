"""Attention of many heads over one set of shared key-and-value rows, with a sink."""

from __future__ import annotations

import torch
from torch import Tensor

from .fill_rows import fill_columns, fill_rows


def attend(
    q: Tensor, rows: Tensor, sink: Tensor, visible: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Average the rows, weighted by a softmax whose sum has one more term, the sink.

    q        [T, heads, k] bf16 or f32
    rows     [N, k] bf16 or f32, keys and values at once
    sink     [heads] f32, a logit that is not scaled
    visible  [T, N] bool, None = all; each query sees at least one row
    returns  [T, heads, k] `dtype`

    s = (q . row) * k^-0.5; o = sum of e^s row / (sum of e^s + e^sink), all in f32, one cast at the
    end. (A vendor kernel rounds e^s to bf16 for the product; that is within an ulp of the result.)
    Source: model specification, section 3.3.
    """
    n_tokens, n_heads, k = q.shape
    n_rows, n_queries = rows.shape[0], n_tokens * n_heads
    # Whole vectors of keys; those added stay hidden.
    values: Tensor = fill_columns(rows.float().T).T
    queries = fill_rows(q.float().reshape(n_queries, k))
    scores = (queries @ values.T) * k**-0.5
    scores[:, n_rows:] = -torch.inf
    if visible is not None:
        hidden = ~visible.repeat_interleave(n_heads, 0)
        scores[:n_queries, :n_rows].masked_fill_(hidden, -torch.inf)
    largest = scores.amax(1, keepdim=True)
    weights = (scores - largest).exp_()
    # In f64, rounded once: the sum of a query does not depend on what the others of a tile see.
    total = weights.sum(1, keepdim=True, dtype=torch.float64)[:n_queries].float()
    total = total + (sink.repeat(n_tokens).unsqueeze(1) - largest[:n_queries]).exp()
    out: Tensor = ((weights @ values)[:n_queries] / total).to(dtype)
    return out.view(n_tokens, n_heads, k)
