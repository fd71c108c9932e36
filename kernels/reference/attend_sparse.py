"""Attention of raw queries over the window ring and the selected rows, turned there and back."""

from __future__ import annotations

import torch
from torch import Tensor

from .attend import attend
from .rotate import rotate


def attend_sparse(
    q: Tensor,
    first: Tensor,
    turns: Tensor,
    ring: Tensor,
    window: int,
    rows: Tensor | None,
    selection: Tensor | None,
    sink: Tensor,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """Rotate each query, attend over what it sees, rotate the result back.

    q          [T, heads * k] f32, rounded to `dtype` before anything else
    first      [1] int64, position of row 0
    turns      [P, r / 2, 2] f32, (cos, sin) by position
    ring       [W, k] `dtype`, the window row of position p at slot p mod W
    window     a query at p sees the window rows of positions max(0, p - window + 1) .. p
    rows       [G, k] `dtype`, compressed rows; None without a selection
    selection  [T, S] i32, rows that a query sees besides, -1 = none; None = none at all
    sink       [heads] f32
    returns    [T, heads * k] f32, exact in `dtype`

    Source: model specification, section 3.3, steps 1, 4 and 5.
    """
    n_tokens, n_heads, k = len(q), len(sink), ring.shape[1]
    positions = first + torch.arange(n_tokens, device=first.device)
    step = torch.view_as_complex(turns[positions])
    queries = rotate(q.to(dtype).view(n_tokens, n_heads, k), step)
    outputs = []
    for token in range(n_tokens):
        seen = torch.arange(window, device=first.device) - window + 1 + positions[token]
        seen_rows = ring[seen[seen >= 0] % len(ring)]
        if selection is not None and rows is not None:
            listed = selection[token]
            seen_rows = torch.cat([seen_rows, rows[listed[listed >= 0].long()]])
        outputs.append(attend(queries[token : token + 1], seen_rows, sink, None, dtype))
    out = torch.cat(outputs) if outputs else queries
    return rotate(out, step.conj()).float().view(n_tokens, n_heads * k)
