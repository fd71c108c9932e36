"""What one forward pass shares between its layers: positions, masks, sources, the selection.

A step takes T tokens at positions first .. first + T - 1 of one sequence. Everything that depends
on positions alone is made here, once for all layers. Source: model specification, section 4.2.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .chunk_check import ChunkCheck
from .record import Record
from .selection import Selection, cut_tiles
from .sequence import Sequence
from .sources import ExpertSource, RowSource


class WindowTile:
    """The window rows of one tile: a range of (older rows, new rows) and who sees which."""

    __slots__ = ("end", "first", "rows", "visible")

    def __init__(self, first: int, end: int, rows: slice, visible: Tensor | None) -> None:
        self.first = first  # queries
        self.end = end
        self.rows = rows
        self.visible = visible  # [tile, rows] bool, None = all


class WindowPlaces(NamedTuple):
    """Slots of a ring of window + T - 1 rows that holds all window rows which a chunk sees."""

    older: Tensor  # of the rows before the chunk
    kept: Tensor  # of those that the sequence's own ring keeps after it


class Step:
    """One forward pass of one chunk; made by the model, read by its layers."""

    def __init__(
        self,
        sequence: Sequence,
        n_tokens: int,
        experts: ExpertSource,
        rows: RowSource,
        record: Record | None = None,
        checks: ChunkCheck | None = None,
        gemv_tokens: int = 0,
    ) -> None:
        config = sequence.config
        self.sequence = sequence
        self.experts = experts
        self.rows = rows
        self.record = record
        self.checks = checks
        self.gemv_tokens = gemv_tokens
        self.first = sequence.position
        self.n_tokens = n_tokens
        self.end = self.first + n_tokens
        self.device = sequence.device
        self.engram_handles: list[int] = []
        # Set by index sources, used by the layers after them within this step.
        self.selection: Selection | None = None
        self.candidates: Tensor | None = None  # [T, blocks] bool, None = every block
        # The same where kernels choose.
        self.chosen: Tensor | None = None  # [T, index_top_k] i32, -1 = none
        self.kept_blocks: Tensor | None = None  # [T, blocks] u8, None = every block
        # Heads of the attention, or of the indexer, times the rows that a query may see.
        n_heads = max(config.n_heads, config.index_n_heads)
        self.cuts = cut_tiles(n_tokens, n_heads * (config.sliding_window + self.end))
        self._set_window(config.sliding_window)

    def _set_window(self, window: int) -> None:
        """Ring slots to read and write."""
        self._window = window
        older = max(0, self.first - window + 1)
        self.n_older = self.first - older
        self.older_slots = torch.arange(older, self.first, device=self.device) % window
        kept = max(self.first, self.end - window)
        self.kept_from = kept - self.first  # earlier rows of the chunk never reach the ring
        self.kept_slots = torch.arange(kept, self.end, device=self.device) % window

    @cached_property
    def positions(self) -> Tensor:
        """The tokens' positions [T] i64."""
        return torch.arange(self.first, self.end, device=self.device)

    @cached_property
    def window_places(self) -> WindowPlaces:
        """Where rows stand in a ring of the chunk's own."""
        n_slots = self._window + self.n_tokens - 1
        older = torch.arange(self.first - self.n_older, self.first, device=self.device)
        return WindowPlaces(older % n_slots, self.positions[self.kept_from :] % n_slots)

    @cached_property
    def tiles(self) -> list[WindowTile]:
        """The tiles' rows and masks."""
        tiles, window, n_older = [], self._window, self.n_older
        for first, end in self.cuts:
            low = max(0, n_older + first - window + 1)
            rows = slice(low, n_older + end)
            mask = None
            if end - first > 1:
                query = torch.arange(n_older + first, n_older + end, device=self.device)[:, None]
                key = torch.arange(low, n_older + end, device=self.device)
                mask = (key <= query) & (key > query - window)
            tiles.append(WindowTile(first, end, rows, mask))
        return tiles

    def visible_groups(self, ratio: int) -> Tensor:
        """Return the number of closed groups that each query sees [T] int64."""
        return torch.arange(self.first + 1, self.end + 1, device=self.device) // ratio

    def most_visible(self, ratio: int) -> list[int]:
        """Return the number of closed groups that each tile's last query sees."""
        return [(self.first + tile.end) // ratio for tile in self.tiles]
