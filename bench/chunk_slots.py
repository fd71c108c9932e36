"""What a chunk reads in measurements: experts that lie on the device, Engram rows all alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compute.experts.arena_view import PieceShapes, pieces_of
from compute.experts.tiers import ExpertTiers
from compute.model.sources import ExpertMatrices, Resident


class AlikeRows:
    """A RowSource that gives one row, as often as rows are wanted."""

    def __init__(self, row_bytes: int, fill: int) -> None:
        self._row = torch.full((1, row_bytes), fill, dtype=torch.uint8, device="cuda")
        self._wanted: list[int] = []

    def request_all(self, wanted: Sequence[tuple[int, NDArray[np.int64]]]) -> list[int]:
        """Note how many rows are wanted."""
        first = len(self._wanted)
        self._wanted += [len(rows) for _, rows in wanted]
        return list(range(first, len(self._wanted)))

    def take(self, handle: int) -> Tensor:
        """Give the rows."""
        return self._row.expand(self._wanted[handle], -1)


class Slots(AlikeRows):
    """The experts of a device cache that holds all of them."""

    def __init__(self, tiers: ExpertTiers, row_bytes: int, pieces: PieceShapes) -> None:
        super().__init__(row_bytes, 56)
        self._slots = tiers.table.cpu().numpy()
        self._tiers = tiers
        self._pieces = pieces

    def stream(self, layer: int, experts: Sequence[int]) -> Iterator[tuple[int, ExpertMatrices]]:
        """Yield views of the slots."""
        for expert in experts:
            slot = self._tiers.cache[int(self._slots[layer, expert])]
            yield expert, pieces_of(slot, self._pieces)

    def resident(self, layer: int, experts: Sequence[int]) -> Resident:
        """Say where all of them are."""
        starts = self._tiers.host_addresses[self._slots[layer, list(experts)]]
        return Resident(starts, self._pieces.offsets, self._pieces.shapes)
