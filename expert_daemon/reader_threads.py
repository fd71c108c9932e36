"""Plain threads that run reads, the most urgent lane first.

Invariants: work is taken from a lane in the order of its submission; a thread that never returns
from a read holds back neither the others nor the end of the process (the threads are daemonic).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from queue import SimpleQueue

from .direct_io import aligned_buffer
from .source import Bytes


class Lane(IntEnum):
    """How urgent a read is; the lower the sooner."""

    DEMAND = 0
    FETCH = 1
    PREFETCH = 2


Work = Callable[[Bytes], None]


class ReaderThreads:
    """`n_threads` threads; each hands its own page-aligned bounce buffer to the work it runs."""

    def __init__(self, n_threads: int, bounce_bytes: int) -> None:
        self._lanes: tuple[deque[Work], ...] = tuple(deque() for _ in Lane)
        self._tokens: SimpleQueue[bool] = SimpleQueue()
        self._bounce_bytes = bounce_bytes
        self._threads = [
            threading.Thread(target=self._run, name=f"reader-{number}", daemon=True)
            for number in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, lane: Lane, work: Work) -> None:
        """Have one of the threads call `work(bounce)` soon."""
        self._lanes[lane].append(work)
        self._tokens.put(True)

    def depth(self) -> int:
        """Pieces of work that no thread has begun."""
        return sum(len(lane) for lane in self._lanes)

    def close(self, timeout: float) -> bool:
        """End the threads after the work in hand; False where one has not ended in time [s]."""
        for lane in self._lanes:
            lane.clear()
        for _ in self._threads:
            self._tokens.put(False)
        for thread in self._threads:
            thread.join(timeout)
            timeout = min(timeout, 0.05) if thread.is_alive() else timeout
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        bounce = aligned_buffer(self._bounce_bytes)
        while self._tokens.get():
            work = self._next()
            if work is not None:
                work(bounce)

    def _next(self) -> Work | None:
        for lane in self._lanes:
            try:
                return lane.popleft()
            except IndexError:
                continue
        return None
