"""The best-scored compressed rows of each query, with a total order."""

from __future__ import annotations

import torch
from torch import Tensor


def select_rows(scores: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """Take the `top_k` best rows: higher score first, then the lower index; NaN ranks last.

    scores   [T, G] f32, -inf where a row is not a candidate
    visible  [T] int64, rows below it are visible
    returns  [T, min(top_k, G)] int64, ascending; -1 (at the end) for a row that is not visible

    Source: model specification, section 3.5, Selection.
    """
    n_rows = scores.shape[1]
    rows = torch.arange(n_rows, device=scores.device)
    hidden = rows >= visible.unsqueeze(1)
    ranked = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    ranked = ranked.masked_fill(hidden, -torch.inf)
    best = ranked.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    best = best.sort(dim=1).values
    return best.masked_fill(best >= visible.unsqueeze(1), -1)
