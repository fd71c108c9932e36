"""Engram rows asked for by clients: from the row cache, or read in batches, into the row ring.

The first rows of the ring are handed out in regions, the others are the cache. Called on the
loop's thread; what is not cached is read by ReaderThreads and comes back through `drain` after
`wake` was called once.

Invariants: a ring region belongs to one request until its RowsDone, or its client's end, and until
no read into it is outstanding. Requests that do not fit wait: the engine's in order, readers' as
RowShare says. Readers never have the room that the engine's largest request takes. What a session
may hold is limited. The cache and its bytes are used under one lock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from protocol.wire.limits import MOST_ROW_REQUESTS, MOST_ROWS

from .direct_io import bounce_buffer
from .outcome import RequestRefused
from .reader_threads import Lane, ReaderThreads
from .row_cache import RowCache
from .row_column import Integers
from .row_job import RowBatch, RowJob, Wanted, batches_of
from .row_ring import RowRing
from .row_share import RowShare
from .row_table import MAX_BATCH_BYTES, RowFault, RowTable
from .source import Bytes

ROW_THREADS = 2  # each has as many reads outstanding as its queue takes
FEW_ROWS = 128  # they are looked up at once and read before readers' larger requests
MAX_FAULTS_LISTED = 64


@dataclass(slots=True)
class RowCounts:
    """Since the start."""

    rows: int = 0  # asked for
    hits: int = 0  # of these, found in the cache; one that is asked for twice at once counts once
    pages: int = 0  # of 4 KiB, read


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
        *,
        n_cached: int = 0,
    ) -> None:
        """Take the ring, whose last `n_cached` rows are the cache."""
        self.tables = tuple(tables)
        self.threads = threads
        self.counts = RowCounts()
        n_regions = len(ring) - n_cached
        self._max_rows = most_rows(len(ring))
        self._max_requests = MOST_ROW_REQUESTS * len(self.tables)
        self._ring = ring[:n_regions]
        self._cached = ring[n_regions:]
        self._cache = RowCache(n_cached)
        self._regions = RowRing(n_regions)
        self._wake = wake
        self._awake = False
        self._lock = threading.Lock()
        self._bounce = bounce_buffer(MAX_BATCH_BYTES if tables else 1)
        self._jobs: dict[int, dict[int, RowJob]] = {}  # by session and request
        self._engines_waiting: deque[RowJob] = deque()
        self._readers = RowShare(self._regions, self._max_rows, self._max_rows)
        self._read: deque[RowJob] = deque()

    @property
    def max_rows(self) -> int:
        """Most rows in one request."""
        return self._max_rows

    @property
    def n_cached(self) -> int:
        """Rows in the cache."""
        return self._cache.n_held

    def request(self, session: int, request: int, wanted: Wanted, *, is_engines: bool) -> None:
        """Begin to read; the same request again is announced again where it is ready.

        The caller has checked the tables and that every row number is below its table's n_rows.
        Raises RequestRefused where too many of the session are not done.
        """
        jobs = self._jobs.get(session, {})
        job = jobs.get(request)
        if job is None:
            if len(jobs) >= self._max_requests:
                text = f"{len(jobs)} are not done, wanted fewer than {self._max_requests}"
                raise RequestRefused("limit", f"row request {request}: {text}")
            n_rows = sum(len(rows) for _, rows in wanted)
            job = RowJob(session, request, wanted, n_rows, is_engines)
            self._jobs.setdefault(session, jobs)[request] = job
            if is_engines:
                self._engines_waiting.append(job)
            else:
                self._readers.wait(job)
            self._start_waiting()
        elif job.is_ready:
            self._read.append(job)

    def done(self, session: int, request: int) -> None:
        """The client has copied the rows, or does not want them any more."""
        job = self._jobs.get(session, {}).pop(request, None)
        if job is not None:
            self._give_up(job)
            self._start_waiting()

    def cancel(self, session: int, request: int) -> bool | None:
        """End a request that is not answered yet: True. False: it was, and is answered again.

        None where there is no such request.
        """
        job = self._jobs.get(session, {}).get(request)
        if job is None:
            return None
        if job.is_ready:
            self._read.append(job)  # the client may be copying: only its RowsDone frees the region
            return False
        self.done(session, request)
        return True

    def client_gone(self, session: int) -> None:
        """Free everything of a session, once its outstanding reads have returned."""
        for job in self._jobs.pop(session, {}).values():
            self._give_up(job)
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
                self._give_back(job)
                self._start_waiting()
        return ready

    def _give_up(self, job: RowJob) -> None:
        job.is_given_up = True
        if job.position >= 0:
            if job.is_ready:
                self._give_back(job)
        elif job.is_engines:
            self._engines_waiting.remove(job)
        else:
            self._readers.leave(job)

    def _give_back(self, job: RowJob) -> None:
        if job.is_engines:
            self._regions.give(job.position, job.n_rows)
        else:
            self._readers.give(job)

    def _start_waiting(self) -> None:
        """Start what there is room for, the engine's first.

        A reader that never says RowsDone must not keep the engine waiting: the first rows of the
        ring, as many as a request may have, are not for readers.
        """
        waiting = self._engines_waiting
        while waiting and (position := self._regions.take(waiting[0].n_rows)) is not None:
            job = waiting.popleft()
            job.position = position
            self._start(job)
        while (reader := self._readers.take_next()) is not None:
            self._start(reader)

    def _start(self, job: RowJob) -> None:
        self.counts.rows += job.n_rows
        if job.n_rows > FEW_ROWS:
            job.n_unread = 1
            self.threads.submit(_lane_of(job), partial(self._begin, job))
            return
        absent = self._copy_cached(job)
        if absent is None:
            self._read.append(job)
            return
        batches = [one for one in self._batches(job, absent) if not self._read_now(one)]
        job.n_unread = len(batches)
        for batch in batches:
            self.threads.submit(_lane_of(job), partial(self._read_batch, job, batch, False))
        if not batches:
            self._read.append(job)

    def _batches(self, job: RowJob, absent: npt.NDArray[np.bool_] | None = None) -> list[RowBatch]:
        return batches_of(job, [table.batch_rows for table in self.tables], absent)

    def _copy_cached(self, job: RowJob) -> npt.NDArray[np.bool_] | None:
        """Copy the rows that are cached; return which are not, None where all are."""
        keys = np.concatenate([self._keys(table, rows) for table, rows in job.wanted])
        region = self._ring[job.position : job.position + job.n_rows]
        with self._lock:
            places = self._cache.find(keys)
            absent: npt.NDArray[np.bool_] = places < 0
            if not absent.any():
                self.counts.hits += job.n_rows
                self._cached.take(places, axis=0, out=region, mode="clip")
                return None
            found = ~absent
            region[found] = self._cached[places[found]]
            self.counts.hits += int(found.sum())
        return absent

    def _keys(self, table: int, rows: npt.NDArray[np.unsignedinteger] | Integers) -> Integers:
        return rows.astype(np.int64) * len(self.tables) + table

    def _begin(self, job: RowJob, _bounce: Bytes) -> None:
        """Cut a large request into batches, on a reader's thread."""
        batches = [] if job.is_given_up else self._batches(job)
        with self._lock:
            job.n_unread += len(batches)
        for batch in batches:
            self.threads.submit(_lane_of(job), partial(self._read_batch, job, batch, True))
        self._end_batch(job, [])

    def _read_now(self, batch: RowBatch) -> bool:
        """Read a batch without waiting, where the page cache has it."""
        data = self.tables[batch.table].read_now(batch.rows, self._bounce)
        if data is None:
            return False
        self._ring[batch.positions, : data.shape[1]] = data[batch.index]
        with self._lock:
            self._remember(batch.table, batch.rows, data)
        return True

    def _read_batch(self, job: RowJob, batch: RowBatch, is_to_look_up: bool, bounce: Bytes) -> None:
        if job.is_given_up:
            self._end_batch(job, [])
            return
        table = self.tables[batch.table]
        rows = batch.rows
        data = np.empty((len(rows), table.row_bytes), np.uint8)
        absent = np.ones(len(rows), np.bool_)
        if is_to_look_up:
            with self._lock:
                places = self._cache.find(self._keys(batch.table, rows))
                absent = places < 0
                data[~absent] = self._cached[places[~absent], : table.row_bytes]
        faults: list[RowFault] = []
        n_pages = 0
        if absent.any():
            data[absent], faults, n_pages = table.read(rows[absent], bounce)
        self._ring[batch.positions, : table.row_bytes] = data[batch.index]
        if faults:
            absent &= ~np.isin(rows, [row for row, _, _ in faults])
        with self._lock:
            self.counts.pages += n_pages
            self.counts.hits += len(rows) - int(absent.sum()) - len(faults)
            self._remember(batch.table, rows[absent], data[absent])
        self._end_batch(job, faults)

    def _remember(self, table: int, rows: Integers, data: Bytes) -> None:
        """Put rows into the cache that are not in it; the lock is held."""
        keys = self._keys(table, rows)
        is_new = self._cache.find(keys) < 0  # else another request has brought it meanwhile
        places = self._cache.take(keys[is_new])
        has_place = places >= 0
        self._cached[places[has_place], : data.shape[1]] = data[is_new][has_place]

    def _end_batch(self, job: RowJob, faults: list[RowFault]) -> None:
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


def _lane_of(job: RowJob) -> Lane:
    return Lane.DEMAND if job.is_engines or job.n_rows <= FEW_ROWS else Lane.FETCH


def serve_rows(tables: Sequence[RowTable], ring: Bytes, wake: Callable[[], None]) -> EngramRows:
    """Return the rows of a daemon, with threads of their own."""
    threads = ReaderThreads(ROW_THREADS if tables else 0, MAX_BATCH_BYTES)
    return EngramRows(tables, ring, threads, wake, n_cached=cached_rows(len(ring)))


def most_rows(ring_rows: int) -> int:
    """Return the most rows in one request, as PROTOCOL.md says."""
    return min(MOST_ROWS, max(ring_rows // 4, min(ring_rows, 1)))


def cached_rows(ring_rows: int) -> int:
    """Return how many rows of a ring are the cache: what three of the largest requests leave.

    One of these is the engine's, and of readers two, so that one leaves the others room.
    """
    return ring_rows - min(3 * most_rows(ring_rows), ring_rows)
