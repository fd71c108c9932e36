"""A token's Engram rows on their way to where the step's launches find them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from compute.model.engram_hash import EngramHash
from compute.model.sequence import Sequence

from .engram_step import EngramStep


class HostRows(Protocol):
    """Where rows come from."""

    def request_all(self, wanted: list[tuple[int, NDArray[np.int64]]]) -> list[int]:
        """Ask for rows of each (table, rows)."""
        ...

    def take_rows(self, handle: int) -> NDArray[np.uint8]:
        """Wait for the rows [n, row_bytes] u8, in the host's memory."""
        ...


class RowFeed:
    """Asks for the rows of a token early, hands them over when a layer needs them."""

    def __init__(self, hashes: EngramHash, source: HostRows, engram: EngramStep) -> None:
        self._hash = hashes
        self._source = source
        self._engram = engram
        self._handles: list[int] = []
        self._ids: NDArray[np.int64] | None = None  # the sequence's last ones, once it is taken in

    def ask(self, sequence: Sequence, token: int) -> None:
        """Ask for the rows of a token that may be the sequence's next."""
        compressed = self._hash.compress(np.array([token], np.int64))
        ids = np.concatenate([sequence.last_ids, compressed])
        tables = range(len(self._engram.staged))
        wanted = [(table, self._hash.rows(table, ids).reshape(-1)) for table in tables]
        self._handles = list(self._source.request_all(wanted))
        self._ids = ids[1:]

    def take_in(self, sequence: Sequence) -> None:
        """The token asked for is in the sequence: its last ids move on."""
        assert self._ids is not None
        sequence.last_ids, self._ids = self._ids, None

    def hand_over(self) -> None:
        """Wait for the rows and put them where they are brought from; nothing where that was done.

        No launch that reads them may be under way.
        """
        for table, handle in enumerate(self._handles):
            rows, staged = self._source.take_rows(handle), self._engram.staged[table]
            staged.numpy()[:] = rows[:, : staged.shape[1]]
        self._handles = []
