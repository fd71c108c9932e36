"""Readers' part of the Engram row ring: who waits for room, whose turn it is, and where. Pure.

The part is cut into areas, each as large as the largest request. All rows that a session holds
stand in one area, so that a reader that never says RowsDone leaves the others an area. The session
that holds least goes first, of equals the one that waits longest, and nobody overtakes it: what it
waits for is given back, or kept by itself.
"""

from __future__ import annotations

from collections import deque

from .row_job import RowJob
from .row_ring import RowRing

Area = tuple[int, int]  # ring rows from the first on, before the second


class RowShare:
    """Gives readers' requests their regions, from ring row `first` on."""

    def __init__(self, ring: RowRing, first: int, most: int) -> None:
        """Cut the rows from `first` on into areas of `most` rows, the last a larger one."""
        self._ring = ring
        n_areas = max(1, (ring.n_rows - first) // most) if most else 1
        starts = [first + index * most for index in range(n_areas)]
        self._areas: list[Area] = list(zip(starts, [*starts[1:], ring.n_rows], strict=True))
        self._n_came = 0
        self._waiting: dict[int, deque[tuple[int, RowJob]]] = {}  # by session, numbered
        self._held: dict[int, dict[int, int]] = {}  # by session: rows by position

    def wait(self, job: RowJob) -> None:
        """From now on a request waits."""
        self._n_came += 1
        self._waiting.setdefault(job.session, deque()).append((self._n_came, job))

    def leave(self, job: RowJob) -> None:
        """A request waits no longer."""
        mine = self._waiting.pop(job.session)
        rest = deque(one for one in mine if one[1] is not job)
        if rest:
            self._waiting[job.session] = rest

    def take_next(self) -> RowJob | None:
        """Return a request that has its region now; None: nobody waits, or who is next has to."""
        turns = [waiting[0] for waiting in self._waiting.values()]
        turns = [turn for turn in turns if not self._keeps_itself_waiting(turn[1])]
        if not turns:
            return None
        _, job = min(turns, key=lambda turn: (self._n_held(turn[1].session), turn[0]))
        for first, end in self._areas_for(job.session):
            position = self._ring.take(job.n_rows, first, end)
            if position is not None:
                job.position = position
                self._held.setdefault(job.session, {})[position] = job.n_rows
                self.leave(job)
                return job
        return None

    def give(self, job: RowJob) -> None:
        """Take a region back."""
        self._ring.give(job.position, job.n_rows)
        held = self._held[job.session]
        del held[job.position]
        if not held:
            del self._held[job.session]

    def _n_held(self, session: int) -> int:
        return sum(self._held.get(session, {}).values())

    def _areas_for(self, session: int) -> list[Area]:
        held = self._held.get(session)
        if not held:
            return self._areas
        position = next(iter(held))
        return [(first, end) for first, end in self._areas if first <= position < end]

    def _keeps_itself_waiting(self, job: RowJob) -> bool:
        """Whether it would not fit if its session alone held anything."""
        held = self._held.get(job.session)
        if not held:
            return False
        ((place, end),) = self._areas_for(job.session)
        for position in sorted(held):
            if position - place >= job.n_rows:
                return False
            place = position + held[position]
        return end - place < job.n_rows
