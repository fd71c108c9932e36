"""Which compressed rows each query of a chunk attends to.

Queries are handled in tiles: a tile reads the union of its queries' rows, and a mask says which
query sees which. A single query reads exactly its own rows, so a decode step has no mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MOST_QUERIES = 512
_LEAST_QUERIES = 16
_MOST_SCORES = 1 << 26  # of all heads of a tile at once


@dataclass(frozen=True, slots=True)
class TileRows:
    """The compressed rows of one tile of queries."""

    rows: slice | Tensor  # group numbers, ascending: the first ones, or [U] int64
    visible: Tensor | None  # [tile, U] bool, None = all

    def take(self, cache: Tensor) -> Tensor:
        """Return the rows [U, k] out of the rows of the source."""
        return (
            cache[self.rows] if isinstance(self.rows, slice) else cache.index_select(0, self.rows)
        )


@dataclass(frozen=True, slots=True)
class Selection:
    """One index source's choice for a chunk; the layers up to the next source use it too."""

    tiles: tuple[TileRows, ...]
    indices: Tensor | None  # [T, k] ascending with -1 at the end; None = every visible row

    def listed(self, visible: Tensor, top_k: int) -> Tensor:
        """Return group numbers [T, top_k] int64, -1 where there is none; for records."""
        if self.indices is not None:
            missing = top_k - self.indices.shape[1]
            return torch.nn.functional.pad(self.indices, (0, missing), value=-1)
        rows = torch.arange(top_k, device=visible.device).expand(len(visible), top_k)
        return rows.masked_fill(rows >= visible.unsqueeze(1), -1)


def cut_tiles(n_tokens: int, scores_per_query: int) -> list[tuple[int, int]]:
    """Cut a chunk into tiles [first, end) whose scores fit into memory."""
    size = max(_LEAST_QUERIES, min(_MOST_QUERIES, _MOST_SCORES // scores_per_query))
    return [(t, min(t + size, n_tokens)) for t in range(0, n_tokens, size)]


def select_all(cuts: list[tuple[int, int]], visible: Tensor, most_visible: list[int]) -> Selection:
    """Select every visible row; `most_visible` is the last query's number for each tile."""
    tiles = []
    for (first, end), n_rows in zip(cuts, most_visible, strict=True):
        mask = None
        if end - first > 1:
            rows = torch.arange(n_rows, device=visible.device)
            mask = rows < visible[first:end].unsqueeze(1)
        tiles.append(TileRows(slice(0, n_rows), mask))
    return Selection(tuple(tiles), None)


def select_listed(cuts: list[tuple[int, int]], indices: Tensor, n_rows: int) -> Selection:
    """Select the listed rows: indices [T, k] int64, ascending, -1 at the end, below n_rows."""
    n_tokens = len(indices)
    if n_tokens == 1:
        own = indices[0]
        return Selection((TileRows(own[own >= 0], None),), indices)
    tiles = []
    for first, end in cuts:
        tile = indices[first:end]
        seen = torch.zeros(end - first, n_rows + 1, dtype=torch.bool, device=indices.device)
        seen.scatter_(1, tile.masked_fill(tile < 0, n_rows), True)
        union = seen[:, :n_rows].any(0).nonzero().squeeze(1)
        tiles.append(TileRows(union, seen.index_select(1, union)))
    return Selection(tuple(tiles), indices)
