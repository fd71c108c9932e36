"""Requests for Engram rows: a token's of all tables at once, a chunk's in parts that fit the ring.

Rows that occur more than once are read once. Invariants: one part is outstanding at a time, so two
tables never fill the ring; a part that a lost daemon owed is asked for again; the rows come out in
the order asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from protocol.errors import DaemonLost, ShardError
from protocol.wire.client import ExpertClient

_UNIQUE_FROM = 64  # below this many rows sorting costs more than reading a few of them twice

Wanted = Sequence[tuple[int, NDArray[np.int64]]]  # tables and rows of them


def row_jobs(wanted: Wanted, max_rows: int) -> list[RowJob]:
    """Return what is to be asked for: few rows in one message, many in one job a table.

    max_rows  of one message
    """
    n_rows = sum(len(rows) for _, rows in wanted)
    is_one = n_rows < min(_UNIQUE_FROM, max_rows + 1) and all(len(rows) for _, rows in wanted)
    if is_one and wanted:
        return [RowJob(wanted)]
    return [RowJob([one]) for one in wanted]


class RowJob:
    """Rows of tables: `send` early, `take` late, `forget` when the daemon is gone.

    Rows of several tables have to fit into one message.
    """

    def __init__(self, wanted: Wanted) -> None:
        self.n_tables = len(wanted)
        self._ends = np.cumsum([len(rows) for _, rows in wanted])
        self._order: NDArray[np.int64] | None = None
        (self._table, rows), *others = wanted
        if len(rows) >= _UNIQUE_FROM:
            rows, self._order = np.unique(rows, return_inverse=True)
        self._rows = rows.astype(np.uint32)
        self._others = others
        self._n_rows = len(rows) + sum(len(more) for _, more in others)
        self._taken: list[NDArray[np.uint8]] = []
        self._n_taken = 0
        self._sent: tuple[int, int] | None = None  # (the client's handle, rows in it)

    def send(self, client: ExpertClient) -> None:
        """Ask for the next part unless one is outstanding. Raises DaemonLost."""
        if self._sent is not None or self._n_taken >= self._n_rows:
            return
        if self._others:
            handle = client.request_rows(self._table, self._rows, self._others)
            self._sent = (handle, self._n_rows)
        else:
            part = self._rows[self._n_taken : self._n_taken + client.max_rows]
            self._sent = (client.request_rows(self._table, part), len(part))

    def take(self, client: ExpertClient, number: int = 0) -> NDArray[np.uint8]:
        """Wait for all rows; those of one table: [n, row_bytes] u8.

        Raises DaemonLost; then it may be repeated.
        """
        while self._n_taken < self._n_rows:
            self.send(client)
            assert self._sent is not None
            handle, n_rows = self._sent
            self._taken.append(client.take_rows(handle))
            self._n_taken += n_rows
            self._sent = None
        rows = self._taken[0] if len(self._taken) == 1 else np.concatenate(self._taken)
        if self._order is not None:
            return rows[self._order]
        return rows[self._ends[number - 1] if number else 0 : self._ends[number]]

    def forget(self) -> None:
        """The daemon is gone: what it owed must be asked for again."""
        self._sent = None

    def drop(self, client: ExpertClient) -> None:
        """Give back what nobody will take: its ring rows must not stay occupied.

        That one of them cannot be read is nobody's matter either.
        """
        if self._sent is not None:
            with contextlib.suppress(DaemonLost, ShardError):
                client.take_rows(self._sent[0])
            self._sent = None
