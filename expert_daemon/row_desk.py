"""Clients' Engram rows: requests checked, answers sent."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from protocol.wire.messages import RowRequest, RowsDone, RowsReady

from .outbox import Outbox
from .outcome import RequestRefused
from .sessions import Session, Sessions
from .works import Works


class RowDesk:
    """Serves rows into the ring."""

    def __init__(self, sessions: Sessions, outbox: Outbox, works: Works) -> None:
        self._sessions = sessions
        self._outbox = outbox
        self._rows = works.rows
        self._counters = works.counters

    def request(self, session: Session, message: RowRequest) -> None:
        """Begin to read rows; the answer comes when all stand in the ring."""
        wanted = [(message.table, np.frombuffer(message.rows, "<u4"))]
        wanted += [(table, np.frombuffer(rows, "<u4")) for table, rows in message.others]
        for table, rows in wanted:
            self._check(message.request, table, rows)
        n_rows = sum(len(rows) for _, rows in wanted)
        if not 1 <= n_rows <= self._rows.max_rows:
            text = f"{n_rows} rows, wanted 1 to {self._rows.max_rows}"
            raise RequestRefused("limit", f"row request {message.request}: {text}")
        is_engines = session.role == "engine"
        self._rows.request(session.number, message.request, wanted, is_engines=is_engines)
        self._counters.row_requests += 1
        self._counters.rows += n_rows

    def _check(self, request: int, table: int, rows: npt.NDArray[np.uint32]) -> None:
        tables = self._rows.tables
        if table >= len(tables):
            text = f"table {table}, the model has {len(tables)}"
        elif int(rows.max(initial=0)) >= tables[table].n_rows:
            text = f"row {int(rows.max())}, table {table} has {tables[table].n_rows} rows"
        else:
            return
        raise RequestRefused("malformed", f"row request {request}: {text}")

    def done(self, session: Session, message: RowsDone) -> None:
        """The client has its rows; their place in the ring is free."""
        self._rows.done(session.number, message.request)

    def cancel(self, session: Session, request: int) -> bool:
        """End a row request with its final answer; False where there is no such request."""
        is_cancelled = self._rows.cancel(session.number, request)
        if is_cancelled:
            faults = ((0, "CANCELLED", "cancelled before the rows were read"),)
            self._outbox.send(session, RowsReady(request, 0, 0, faults))
        return is_cancelled is not None

    def send_ready(self) -> None:
        """Answer the requests whose rows have come."""
        for job in self._rows.drain():
            session = self._sessions.by_number.get(job.session)
            if session is not None:
                self._counters.row_errors += len(job.faults)
                faults = tuple(job.faults)
                ready = RowsReady(job.request, job.position, job.n_rows, faults)
                self._outbox.send(session, ready)
