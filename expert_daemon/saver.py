"""Writes what is to outlive the daemon, now and then and at the end, on a thread of its own.

The state directory may hang: nobody but that thread waits for it longer than `CLOSE_S`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from .log import log

PERIOD_S = 60.0
REST_S = 0.1  # between two rounds: what comes meanwhile is written together
CLOSE_S = 3.0


class Saver:
    """Calls each of `jobs` every `period_s`, when `wanted` is set, and once more in `close`."""

    def __init__(
        self,
        jobs: Sequence[Callable[[], None]],
        period_s: float = PERIOD_S,
        wanted: threading.Event | None = None,
    ) -> None:
        """The jobs may do file I/O; what they need of others is theirs to lock."""
        self._jobs = jobs
        self._period_s = period_s
        self._wanted = wanted or threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="saver", daemon=True)
        self._thread.start()

    def close(self, timeout: float = CLOSE_S) -> None:
        """Save one last time; a write that hangs is left to itself."""
        self._ended.set()
        self._wanted.set()
        self._thread.join(timeout)
        if self._thread.is_alive():
            log("the state directory does not answer: the process ends without its last save")

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._wanted.wait(self._period_s)
            self._wanted.clear()
            is_last = self._ended.is_set()  # asked first: all that came before is saved
            for job in self._jobs:
                job()
            self._ended.wait(REST_S)
