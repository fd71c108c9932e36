"""The indexer's queries."""

from __future__ import annotations

import torch
from torch import Tensor

from .rotate import rotate
from .round_fp4_index import round_fp4_index


def index_queries(
    projected: Tensor, first: Tensor, turns: Tensor, *, dim: int, dtype: torch.dtype, rounds: bool
) -> Tensor:
    """Turn the query heads of each token at its position and round them.

    projected  [T, heads * dim] f32
    first      [1] i64, the position of row 0
    turns      [P, r / 2, 2] f32
    returns    [T, heads, dim] f32

    Source: model specification, sections 3.5 and 2.2.
    """
    position = int(first) + torch.arange(len(projected), device=projected.device)
    queries = projected.to(dtype).unflatten(1, (-1, dim))
    queries = rotate(queries, torch.view_as_complex(turns[position]))
    return round_fp4_index(queries) if rounds else queries.float()
