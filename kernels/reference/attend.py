"""Attention of many heads over one set of shared key-and-value rows, with a sink."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .fill_rows import MANY_ROWS, fill_rows

_COLUMNS = 4


def attend(
    q: Tensor, rows: Tensor, sink: Tensor, visible: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Average the rows, weighted by a softmax whose sum has one more term, the sink.

    q        [T, heads, k] bf16 or f32
    rows     [N, k] bf16 or f32, keys and values at once
    sink     [heads] f32, a logit that is not scaled
    visible  [T, N] bool, None = all; each query sees at least one row
    returns  [T, heads, k] `dtype`

    s = (q . row) * k^-0.5; o = sum of e^s row / (sum of e^s + e^sink). Scores and sums are f32; the
    probabilities are rounded to `dtype` for the product only, the sum takes them as they are.
    Source: model specification, section 3.3.
    """
    n_tokens, n_heads, k = q.shape
    n_rows = rows.shape[0]
    values = rows.float()
    queries = fill_rows(q.float().reshape(n_tokens * n_heads, k))
    keys = pad(values, (0, 0, 0, max(0, MANY_ROWS - n_rows)))
    scores = (queries @ keys.T)[:, :n_rows] * k**-0.5
    if visible is not None:
        hidden = ~visible.repeat_interleave(n_heads, 0)
        scores[: n_tokens * n_heads].masked_fill_(hidden, -torch.inf)
    largest = scores.amax(1, keepdim=True)
    weights = (scores - largest).exp_()
    # Summed as a product, one row after the other: what is hidden adds zeros and no other order.
    total = (weights @ values.new_ones(n_rows, _COLUMNS))[:, :1]
    mixed = weights.to(dtype).float() @ values
    heads = slice(0, n_tokens * n_heads)
    total = total[heads] + (sink.repeat(n_tokens).unsqueeze(1) - largest[heads]).exp()
    return (mixed[heads] / total).to(dtype).view(n_tokens, n_heads, k)
