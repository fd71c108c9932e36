"""A token's Engram rows on their way into the step's device buffers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from compute.model.engram_hash import EngramHash
from compute.model.sequence import Sequence
from compute.model.sources import RowSource

from .engram_step import EngramStep


class RowFeed:
    """Asks for the rows of a token early, hands them over when a layer needs them."""

    def __init__(self, hashes: EngramHash, source: RowSource, engram: EngramStep) -> None:
        self._hash = hashes
        self._source = source
        self._engram = engram
        self._handles: list[int] = []
        self._staged = [_staging(rows) for rows in engram.rows]

    def ask(self, sequence: Sequence, token: int) -> None:
        """Ask for the rows of the sequence's next token; its last ids move on."""
        compressed = self._hash.compress(np.array([token], np.int64))
        ids = np.concatenate([sequence.last_ids, compressed])
        tables = range(len(self._engram.rows))
        wanted = [(table, self._hash.rows(table, ids).reshape(-1)) for table in tables]
        self._handles = list(self._source.request_all(wanted))
        sequence.last_ids = ids[1:]

    def hand_over(self) -> None:
        """Wait for the rows and copy them to the device; nothing where that was done."""
        for table, handle in enumerate(self._handles):
            rows = self._source.take(handle)
            target, staged = self._engram.rows[table], self._staged[table]
            staged.copy_(rows[:, : target.shape[1]])
            target.copy_(staged, non_blocking=True)
        self._handles = []


def _staging(rows: Tensor) -> Tensor:
    return torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda)
