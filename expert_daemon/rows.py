"""Engram rows asked for by clients, read in batches into the row ring.

Called on the loop's thread; larger batches are read by ReaderThreads and come back through
`drain` after `wake` was called once.

Invariants: a ring region belongs to one request until its RowsDone, or its client's end, and until
no read into it is outstanding. Requests that do not fit wait in order and are not overtaken.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from .direct_io import aligned_buffer
from .reader_threads import Lane, ReaderThreads
from .row_ring import RowRing
from .row_table import MAX_BATCH_BYTES, RowFault, Rows, RowTable
from .source import Bytes

MAX_INLINE_ROWS = 64
MAX_FAULTS_LISTED = 64


@dataclass(slots=True)
class RowJob:
    """One request's rows; `position` is -1 until it has a region of the ring."""

    session: int
    request: int
    table: int
    rows: npt.NDArray[np.uint32]  # as asked for, duplicates and all
    position: int = -1
    n_unread: int = 0  # batches that have not been read yet
    is_ready: bool = False
    is_given_up: bool = False  # done with, or its client is gone
    faults: list[RowFault] = field(default_factory=list)


class EngramRows:
    """Serves row requests out of `tables` into `ring`, u8 [ring_rows, row_bytes].

    A row of the ring is as long as the longest table's; a shorter one fills its beginning.
    """

    def __init__(
        self,
        tables: Sequence[RowTable],
        ring: Bytes,
        threads: ReaderThreads,
        wake: Callable[[], None],
    ) -> None:
        self.tables = tuple(tables)
        self._ring = ring
        self._regions = RowRing(len(ring))
        self._threads = threads
        self._wake = wake
        self._awake = False
        self._lock = threading.Lock()
        self._bounce = aligned_buffer(MAX_BATCH_BYTES if tables else 1)
        self._jobs: dict[tuple[int, int], RowJob] = {}
        self._waiting: deque[RowJob] = deque()
        self._read: deque[RowJob] = deque()
        self.n_rows_read = 0
        self.n_inline = 0

    @property
    def max_rows(self) -> int:
        """Most rows in one request."""
        return max(len(self._ring) // 4, min(len(self._ring), 1))

    def request(self, session: int, request: int, table: int, rows: npt.NDArray[np.uint32]) -> None:
        """Begin to read; the same request again is announced again where it is ready.

        The caller has checked the table and that every row number is below its n_rows.
        """
        job = self._jobs.get((session, request))
        if job is None:
            job = RowJob(session, request, table, rows)
            self._jobs[session, request] = job
            self._waiting.append(job)
            self._start_waiting()
        elif job.is_ready:
            self._read.append(job)

    def done(self, session: int, request: int) -> None:
        """The client has copied the rows, or does not want them any more."""
        job = self._jobs.pop((session, request), None)
        if job is not None:
            self._give_up(job)
            self._start_waiting()

    def cancel(self, session: int, request: int) -> bool | None:
        """End a request that is not answered yet: True. False: it was, and is answered again.

        None where there is no such request.
        """
        job = self._jobs.get((session, request))
        if job is None:
            return None
        if job.is_ready:
            self._read.append(job)  # the client may be copying: only its RowsDone frees the region
            return False
        self.done(session, request)
        return True

    def client_gone(self, session: int) -> None:
        """Free everything of a session, once its outstanding reads have returned."""
        for key in [key for key in self._jobs if key[0] == session]:
            self._give_up(self._jobs.pop(key))
        self._start_waiting()

    def drain(self) -> list[RowJob]:
        """Return the jobs whose rows stand in the ring now, to be answered.

        Call it also after each `request`, `done` and `client_gone`: these wake nobody.
        """
        self._awake = False
        ready = []
        while self._read:
            job = self._read.popleft()
            if not job.is_given_up:
                job.is_ready = True
                job.faults.sort()
                del job.faults[MAX_FAULTS_LISTED:]
                ready.append(job)
            elif not job.is_ready:  # else it was announced twice, and is free already
                self._regions.give(job.position, len(job.rows))
                self._start_waiting()
        return ready

    def _give_up(self, job: RowJob) -> None:
        job.is_given_up = True
        if job.position < 0:
            self._waiting.remove(job)
        elif job.is_ready:
            self._regions.give(job.position, len(job.rows))

    def _start_waiting(self) -> None:
        while self._waiting:
            position = self._regions.take(len(self._waiting[0].rows))
            if position is None:
                return
            job = self._waiting.popleft()
            job.position = position
            self._start(job)

    def _start(self, job: RowJob) -> None:
        order = np.argsort(job.rows, kind="stable")
        rows = job.rows[order].astype(np.int64)
        table = self.tables[job.table]
        self.n_rows_read += len(rows)
        if len(rows) <= min(MAX_INLINE_ROWS, table.batch_rows):
            found = table.read_cached(rows, self._bounce)
            if found is not None:
                self.n_inline += len(rows)
                self._ring[job.position + order, : table.row_bytes] = found
                self._read.append(job)
                return
        batches = range(0, len(rows), table.batch_rows)
        job.n_unread = len(batches)
        for first in batches:
            last = first + table.batch_rows
            work = partial(self._read_batch, job, rows[first:last], order[first:last])
            self._threads.submit(Lane.DEMAND, work)

    def _read_batch(self, job: RowJob, rows: Rows, places: Rows, bounce: Bytes) -> None:
        faults: list[RowFault] = []
        if not job.is_given_up:
            found, faults = self.tables[job.table].read(rows, bounce)
            self._ring[job.position + places, : found.shape[1]] = found
        with self._lock:
            job.faults += faults
            job.n_unread -= 1
            is_last = job.n_unread == 0
        if is_last:
            self._announce(job)

    def _announce(self, job: RowJob) -> None:
        self._read.append(job)
        if not self._awake:
            self._awake = True
            self._wake()
