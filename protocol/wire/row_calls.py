"""Engram rows through the ring, for both roles.

Ring rows belong to the daemon: they are copied out, then given back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import DaemonLost, HeadraceError, ProtocolError, ShardError

from . import messages as m
from .connection import Deadline
from .limits import MOST_ROWS, ROWS_MS
from .reader_calls import SHARD_CODES
from .records import ROW_NUMBER
from .requests import Requests, refusal


class RowCalls(Requests):
    """Calls for rows of the Engram tables."""

    @property
    def max_rows(self) -> int:
        """The most rows of one request; 0 where the model has no Engram table."""
        ring_rows = self._mapped.view.layout.ring_rows
        return min(MOST_ROWS, max(ring_rows // 4, min(ring_rows, 1)))

    def rows(self, table: int, row_numbers: Any) -> NDArray[np.uint8]:
        """A copy of these rows, u8 [n, row_bytes], in the order asked for; any number of them."""
        numbers = _row_numbers(row_numbers)
        taken = np.empty((len(numbers), self._mapped.view.layout.row_bytes), np.uint8)
        for begin in range(0, len(numbers), max(self.max_rows, 1)):
            part = numbers[begin : begin + self.max_rows]
            taken[begin : begin + len(part)] = self.take_rows(self.request_rows(table, part))
        return taken

    def request_rows(
        self, table: int, row_numbers: Any, others: Iterable[tuple[int, Any]] = ()
    ) -> int:
        """Ask for at most max_rows rows; the handle is for take_rows, to be taken once.

        others  further tables, each with its row numbers; theirs follow in the same answer
        """
        numbers = _row_numbers(row_numbers)
        more = [(int(other), _row_numbers(wanted)) for other, wanted in others]
        n_rows = len(numbers) + sum(len(wanted) for _, wanted in more)
        if not 1 <= n_rows <= self.max_rows:
            raise ValueError(f"{n_rows} rows in one request, wanted 1 to {self.max_rows}")
        handle = self._next_number()
        rest = tuple((other, wanted.tobytes()) for other, wanted in more)
        self._connection.send(m.RowRequest(handle, int(table), numbers.tobytes(), rest))
        self._rows_wanted[handle] = n_rows
        return handle

    def take_rows(self, handle: int, *, timeout_ms: float = ROWS_MS) -> NDArray[np.uint8]:
        """A copy of the rows of a handle, u8 [n, row_bytes].

        Raises ShardError where a row cannot be read, DaemonLost where the rows do not come or were
        asked of a daemon that is gone.
        """
        self._connection.check()
        if handle not in self._rows_wanted:
            raise DaemonLost(f"rows {handle}: not asked for in this session, or taken already")
        try:
            answer = self._rows_answer(handle, timeout_ms)
        except HeadraceError:
            self._rows_wanted.pop(handle, None)
            raise
        n_wanted = self._rows_wanted.pop(handle)
        copy = self._copy(answer)
        self._connection.send(m.RowsDone(handle))
        if answer.errors:
            raise _rows_error(answer.errors)
        if answer.n_rows != n_wanted:
            raise ProtocolError(f"rows {handle}: {answer.n_rows} came, {n_wanted} were asked for")
        return copy

    def _rows_answer(self, handle: int, timeout_ms: float) -> m.RowsReady:
        answer = self._rows_ready.pop(handle, None)
        if answer is None:
            answer = self._answer(handle, m.RowsReady, Deadline(timeout_ms))
        if answer is None:
            cancelled: m.RowsReady = self._cancel(handle, m.RowsReady, "RowRequest", timeout_ms)
            return cancelled
        if isinstance(answer, m.Refused):
            raise refusal(answer)
        return answer

    def _copy(self, answer: m.RowsReady) -> NDArray[np.uint8]:
        return self._mapped.view.ring[answer.position : answer.position + answer.n_rows].copy()


def _row_numbers(row_numbers: Any) -> NDArray[Any]:
    numbers = np.asarray(row_numbers)
    if numbers.size and (numbers.ndim != 1 or numbers.dtype.kind not in "iu"):
        raise ValueError(f"row numbers {numbers.dtype} {numbers.shape}, wanted integers [n]")
    if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < 1 << 32:
        raise ValueError(f"row numbers {numbers.min()} to {numbers.max()}, wanted u32")
    return numbers.astype(ROW_NUMBER)


def _rows_error(errors: tuple[tuple[int, str, str], ...]) -> HeadraceError:
    text = "; ".join(f"row {row}: {code}: {why}" for row, code, why in errors[:8])
    if any(code in SHARD_CODES for _, code, _ in errors):
        return ShardError(text)
    return DaemonLost(text)
