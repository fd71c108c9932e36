"""The queue of requests: what waits, what runs, who gave up.

Both threads use it. Invariants: one job runs at a time, in the order of arrival; at most
`max_waiting` wait beside it; a job leaves by `take` and `end`, or, while it waits, by being
cancelled; a job that runs is only marked, and its owner looks at `should_stop`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from .wishes import Wishes


@dataclass(slots=True, eq=False)
class Job:
    """One Generate."""

    session: int
    id: int
    prompt_ids: tuple[int, ...]
    wishes: Wishes
    ends_at: float | None = None  # monotonic seconds; None: no deadline
    arrived: float = field(default_factory=time.monotonic)
    is_cancelled: bool = False
    position: int = -1  # as last told

    @property
    def is_late(self) -> bool:
        """Whether its deadline has passed."""
        return self.ends_at is not None and time.monotonic() >= self.ends_at

    def should_stop(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.is_cancelled or self.is_late


class JobQueue:
    """Jobs in order of arrival.

    max_waiting   jobs that wait at most, beside the one that runs
    """

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._closed = False

    @property
    def n_waiting(self) -> int:
        """Jobs that wait."""
        return len(self._waiting)

    @property
    def running(self) -> Job | None:
        """The job that runs."""
        return self._running

    def add(self, job: Job) -> bool:
        """Take a job and set its place; False where the queue is full or closed."""
        with self._changed:
            n_before = len(self._waiting) + (self._running is not None)
            if self._closed or n_before > self.max_waiting:
                return False
            job.position = n_before
            self._waiting.append(job)
            self._changed.notify()
            return True

    def take(self, timeout_s: float) -> Job | None:
        """Wait for the next job and make it the running one; None after `timeout_s`."""
        with self._changed:
            if not self._waiting and not self._closed:
                self._changed.wait(timeout_s)
            if not self._waiting or self._closed:
                return None
            self._running = self._waiting.popleft()
            return self._running

    def end(self, job: Job) -> None:
        """The running job has ended."""
        with self._changed:
            assert self._running is job
            self._running = None

    def cancel(self, session: int, number: int) -> list[Job]:
        """Cancel one job; it is returned where it waited."""
        return self._cancel(lambda job: (job.session, job.id) == (session, number))

    def cancel_session(self, session: int) -> list[Job]:
        """Cancel every job of a session; those that waited are returned."""
        return self._cancel(lambda job: job.session == session)

    def remove_late(self) -> list[Job]:
        """Return the waiting jobs whose deadline has passed, waiting no more."""
        return self._remove(lambda job: job.is_late)

    def close(self) -> list[Job]:
        """Cancel everything and take nothing more; those that waited are returned."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        return self._cancel(lambda _job: True)

    @property
    def is_closed(self) -> bool:
        """Whether nothing is taken any more."""
        return self._closed

    def moved(self) -> list[tuple[Job, int]]:
        """Return (job, requests before it) of each whose place is another than last told."""
        with self._changed:
            ahead = 0 if self._running is None else 1
            placed = [(job, ahead + place) for place, job in enumerate(self._waiting)]
            if self._running is not None:
                placed.insert(0, (self._running, 0))
            found = [(job, place) for job, place in placed if job.position != place]
            for job, place in found:
                job.position = place
            return found

    def _cancel(self, wanted: Callable[[Job], bool]) -> list[Job]:
        removed = self._remove(wanted)
        for job in removed:
            job.is_cancelled = True
        with self._changed:
            running = self._running
            if running is not None and wanted(running):
                running.is_cancelled = True
        return removed

    def _remove(self, wanted: Callable[[Job], bool]) -> list[Job]:
        with self._changed:
            removed = [job for job in self._waiting if wanted(job)]
            for job in removed:
                self._waiting.remove(job)
            return removed
