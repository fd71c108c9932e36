"""The candidate blocks that later index sources may select from."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def select_blocks(scores: Tensor, visible: Tensor, block_size: int, top_blocks: int) -> Tensor:
    """Keep the best blocks of rows of each query, its newest visible one always.

    scores   [T, G] f32; rows that are not visible need no special score
    visible  [T] int64, rows below it are visible
    returns  [T, ceil(G / block_size)] bool, True for a kept block

    A block scores as its best row; the block of row visible - 1 scores +inf; blocks whose score is
    -inf are dropped. Ties go to the lower block, NaN ranks last.
    Source: model specification, section 3.6.
    """
    n_rows = scores.shape[1]
    n_blocks = -(-n_rows // block_size)
    rows = torch.arange(n_rows, device=scores.device)
    ranked = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    ranked = ranked.masked_fill(rows >= visible.unsqueeze(1), -torch.inf)
    ranked = pad(ranked, (0, n_blocks * block_size - n_rows), value=-torch.inf)
    best = ranked.view(-1, n_blocks, block_size).amax(2)
    newest = (
        torch.arange(n_blocks, device=scores.device) == (visible.unsqueeze(1) - 1) // block_size
    )
    best = best.masked_fill(newest, torch.inf)
    chosen = best.sort(dim=1, descending=True, stable=True).indices[:, :top_blocks]
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, chosen, True)
    return kept & (best > -torch.inf)
