"""One request for Engram rows, in parts that the daemon's ring can hold.

Rows that occur more than once are read once. Invariants: one part is outstanding at a time, so two
tables never fill the ring; a part that a lost daemon owed is asked for again; the rows come out in
the order asked for.
"""

from __future__ import annotations

import contextlib

import numpy as np
from numpy.typing import NDArray

from protocol.errors import DaemonLost
from protocol.wire.client import ExpertClient

_UNIQUE_FROM = 64  # below this many rows sorting costs more than reading a few of them twice


class RowJob:
    """Rows of one table: `send` early, `take` late, `forget` when the daemon is gone."""

    def __init__(self, table: int, rows: NDArray[np.int64]) -> None:
        self._table = table
        self._order: NDArray[np.int64] | None = None
        if len(rows) >= _UNIQUE_FROM:
            rows, self._order = np.unique(rows, return_inverse=True)
        self._rows = rows.astype(np.uint32)
        self._taken: list[NDArray[np.uint8]] = []
        self._n_taken = 0
        self._sent: tuple[int, int] | None = None  # (the client's handle, rows in it)

    def send(self, client: ExpertClient) -> None:
        """Ask for the next part unless one is outstanding. Raises DaemonLost."""
        if self._sent is None and self._n_taken < len(self._rows):
            part = self._rows[self._n_taken : self._n_taken + client.max_rows]
            self._sent = (client.request_rows(self._table, part), len(part))

    def take(self, client: ExpertClient) -> NDArray[np.uint8]:
        """Wait for all rows: [n, row_bytes] u8. Raises DaemonLost; then it may be repeated."""
        while self._n_taken < len(self._rows):
            self.send(client)
            assert self._sent is not None
            handle, n_rows = self._sent
            self._taken.append(client.take_rows(handle))
            self._n_taken += n_rows
            self._sent = None
        rows = self._taken[0] if len(self._taken) == 1 else np.concatenate(self._taken)
        return rows if self._order is None else rows[self._order]

    def forget(self) -> None:
        """The daemon is gone: what it owed must be asked for again."""
        self._sent = None

    def drop(self, client: ExpertClient) -> None:
        """Give back what nobody will take: its ring rows must not stay occupied."""
        if self._sent is not None:
            with contextlib.suppress(DaemonLost):
                client.take_rows(self._sent[0])
            self._sent = None
