"""Plain threads that run reads, the most urgent lane first.

Invariants: work is taken from a lane in the order of its submission; none is begun in an idle lane
while somebody waits for other work, begun or not; a thread that never returns from a read holds
back neither the others nor the end of the process (the threads are daemonic), and another one takes
its place, up to MAX_SPARE of them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from queue import SimpleQueue

from .direct_io import bounce_buffer
from .source import Bytes


class Lane(IntEnum):
    """How urgent a read is; the lower the sooner."""

    DEMAND = 0
    FETCH = 1
    IDLE = 2  # by all threads, while nobody waits for anything
    PREFETCH = 3  # as IDLE, but by threads of its own

    @property
    def is_urgent(self) -> bool:
        """Whether somebody waits for it."""
        return self < Lane.IDLE


Work = Callable[[Bytes], None]

# Two reads in flight hide a drive's latency. On two processors the second would only keep one of
# them from whoever waits, and brings nothing: what is read ahead then is bound by the processors.
N_PREFETCH_THREADS = min(2, max(1, len(os.sched_getaffinity(0)) - 1))
MAX_SPARE = 32  # threads beyond those wanted, for as many that hang in a read


class _Worker:
    """One thread; `since` is when it began what it runs [ns, monotonic], 0 while it waits.

    Of the kernel's batch policy: its share of the processors is any thread's, but when it wakes, it
    waits for an idle processor or its turn. Else each part that arrives would take the processor
    from the kernel's own worker that copies the next one, from the loop, or from ZeroMQ's threads:
    where there are two, a sixth of a missing expert's time on a drive in RAM.
    """

    __slots__ = ("_run", "since", "thread")

    def __init__(self, run: Callable[[_Worker], None], name: str) -> None:
        self.since = 0
        self._run = run
        self.thread = threading.Thread(target=self._begin, name=name, daemon=True)
        self.thread.start()

    def _begin(self) -> None:
        with contextlib.suppress(OSError):  # a sandbox that allows it to nobody
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # of this thread alone
        self._run(self)


class ReaderThreads:
    """`n_threads` threads; each hands a page-aligned bounce buffer to the work that it runs."""

    def __init__(self, n_threads: int, bounce_bytes: int) -> None:
        self._lanes: tuple[deque[Work], ...] = tuple(deque() for _ in Lane)
        self._tokens: SimpleQueue[bool] = SimpleQueue()
        self._bounce_bytes = bounce_bytes
        self._bounces: list[Bytes] = []  # that no work has now
        self._wanted = n_threads
        self._n_begun = 0
        self._lock = threading.Lock()  # of the three below
        self._workers: list[_Worker] = []
        self._n_stuck = 0
        self._closed = False
        self._gate = threading.Lock()  # of the one below
        self._n_urgent = 0  # pieces of work in urgent lanes, begun or not
        self._prefetch_tokens: SimpleQueue[bool] = SimpleQueue()
        for _ in range(n_threads):
            self._begin_one()
        self._prefetchers = [
            _Worker(self._prefetch, f"prefetch-{number}") for number in range(N_PREFETCH_THREADS)
        ]

    def submit(self, lane: Lane, work: Work) -> None:
        """Have one of the threads call `work(bounce)` soon, or once nobody waits."""
        if lane.is_urgent:
            with self._gate:
                self._n_urgent += 1
        self._lanes[lane].append(work)
        if lane is Lane.PREFETCH:
            _wake(self._prefetch_tokens, N_PREFETCH_THREADS)
        else:
            _wake(self._tokens, self._wanted)

    def go_on(self, lane: Lane, work: Work) -> None:
        """Have the thread that calls this, from work of an urgent lane, run `work` next.

        Unless somebody waits for more urgent work; nobody is woken for it.
        """
        with self._gate:
            self._n_urgent += 1
        self._lanes[lane].appendleft(work)

    def depth(self) -> int:
        """Pieces of work that no thread has begun."""
        return sum(len(lane) for lane in self._lanes)

    def depths(self) -> dict[str, int]:
        """Pieces of work that no thread has begun, by lane."""
        return {lane.name.lower(): len(self._lanes[lane]) for lane in Lane}

    def relieve(self, stuck_ns: int) -> int:
        """Begin a thread for each that has been in one piece of work for longer than this.

        Returns how many are. Threads too many end when they have finished what they run.
        """
        now = time.monotonic_ns()
        with self._lock:
            busy = [worker.since for worker in self._workers]
            self._n_stuck = sum(0 < since < now - stuck_ns for since in busy)
            n_wanted = self._wanted + min(self._n_stuck, MAX_SPARE)
            while len(self._workers) < n_wanted and not self._closed:
                self._begin_one()
                self._tokens.put(True)  # those of who hangs may have been meant for it
        if self._n_stuck:
            self._wake_idle()  # what hangs is waited for in vain
        return self._n_stuck

    def close(self, timeout: float) -> bool:
        """End the threads after the work in hand; False where one has not ended in time [s]."""
        for lane in self._lanes:
            lane.clear()
        with self._lock:
            self._closed = True
            workers = list(self._workers)
        for _ in workers:
            self._tokens.put(False)
        for _ in self._prefetchers:
            self._prefetch_tokens.put(False)
        workers += self._prefetchers
        for worker in workers:
            worker.thread.join(timeout)
            timeout = min(timeout, 0.05) if worker.thread.is_alive() else timeout
        return not any(worker.thread.is_alive() for worker in workers)

    def _begin_one(self) -> None:
        self._n_begun += 1
        self._workers.append(_Worker(self._run, f"reader-{self._n_begun}"))

    def _run(self, worker: _Worker) -> None:
        while self._tokens.get():
            while (found := self._next()) is not None:
                lane, work = found
                worker.since = time.monotonic_ns()
                bounce = self._take_bounce()
                work(bounce)
                self._bounces.append(bounce)
                worker.since = 0
                if lane.is_urgent:
                    self._ended_urgent()
                if self._is_too_many(worker):
                    self._tokens.put(True)  # for what this one would have taken next
                    return

    def _prefetch(self, worker: _Worker) -> None:
        while self._prefetch_tokens.get():
            while (work := self._next_idle(Lane.PREFETCH)) is not None:
                worker.since = time.monotonic_ns()
                bounce = self._take_bounce()
                work(bounce)
                self._bounces.append(bounce)
                worker.since = 0

    def _take_bounce(self) -> Bytes:
        """The one that was used last, whichever thread did: the caches may still hold it."""
        try:
            return self._bounces.pop()
        except IndexError:
            return bounce_buffer(self._bounce_bytes)

    def _ended_urgent(self) -> None:
        with self._gate:
            self._n_urgent -= 1
        if self._is_idle():
            self._wake_idle()

    def _is_idle(self) -> bool:
        return self._n_urgent <= self._n_stuck

    def _wake_idle(self) -> None:
        for _ in range(min(len(self._lanes[Lane.IDLE]), self._wanted)):
            _wake(self._tokens, self._wanted)
        for _ in range(min(len(self._lanes[Lane.PREFETCH]), N_PREFETCH_THREADS)):
            _wake(self._prefetch_tokens, N_PREFETCH_THREADS)

    def _is_too_many(self, worker: _Worker) -> bool:
        if len(self._workers) <= self._wanted:
            return False
        with self._lock:
            is_too_many = len(self._workers) > self._wanted + self._n_stuck and not self._closed
            if is_too_many:
                self._workers.remove(worker)
            return is_too_many

    def _next(self) -> tuple[Lane, Work] | None:
        for lane in (Lane.DEMAND, Lane.FETCH):
            try:
                return lane, self._lanes[lane].popleft()
            except IndexError:
                continue
        work = self._next_idle(Lane.IDLE)
        return None if work is None else (Lane.IDLE, work)

    def _next_idle(self, lane: Lane) -> Work | None:
        if not self._is_idle() or self._closed:
            return None
        try:
            return self._lanes[lane].popleft()
        except IndexError:
            return None


def _wake(tokens: SimpleQueue[bool], n_threads: int) -> None:
    """Have a thread look for work, unless as many as there are will do so anyway.

    Whoever takes a token looks into the lanes after it was put; more of them would only be taken
    one by one, in vain, while somebody waits.
    """
    if tokens.qsize() < n_threads:
        tokens.put(True)
