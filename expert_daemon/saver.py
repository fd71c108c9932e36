"""Writes what is to outlive the daemon, every minute and at the end, on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

PERIOD_S = 60.0


class Saver:
    """Calls each of `jobs` every `period_s` and once more in `close`; they may do file I/O."""

    def __init__(self, jobs: Sequence[Callable[[], None]], period_s: float = PERIOD_S) -> None:
        self._jobs = jobs
        self._period_s = period_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="saver", daemon=True)
        self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """End the thread and save one last time, unless a write hangs."""
        self._ended.set()
        self._thread.join(timeout)
        if not self._thread.is_alive():
            self._save()

    def _run(self) -> None:
        while not self._ended.wait(self._period_s):
            self._save()

    def _save(self) -> None:
        for job in self._jobs:
            job()
