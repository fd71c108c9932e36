"""A service's sign of life to systemd, given by the loops that do its work and by no timer.

Invariant: a sign is sent only when every named loop has beaten since the last one, so one loop that
hangs ends the signs. Where the manager watches nobody, a beat costs one comparison.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping

from .sd_notify import notify

SIGNS_PER_INTERVAL = 4
_LONGEST_PAUSE_US = 1 << 52


class Watchdog:
    """Sends WATCHDOG=1 while all of `loops` beat; each from whatever thread it runs on.

    environ   where WATCHDOG_USEC and WATCHDOG_PID stand, the process' environment by default
    """

    def __init__(self, *loops: str, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self._environ = environ
        self._loops = frozenset(loops)
        self._silent = set(self._loops)
        self._lock = threading.Lock()
        self._pause_s = _interval_s(environ) / SIGNS_PER_INTERVAL
        self._next_at = 0.0

    @property
    def is_watched(self) -> bool:
        """Whether a manager waits for signs of this process."""
        return self._pause_s > 0

    def beat(self, loop: str) -> None:
        """Note that a loop has come round; often, for signs are sent a few times an interval."""
        if not self.is_watched:
            return
        with self._lock:
            self._silent.discard(loop)
            now = time.monotonic()
            if self._silent or now < self._next_at:
                return
            self._silent |= self._loops
            self._next_at = now + self._pause_s
        notify("WATCHDOG=1", environ=self._environ)


def _interval_s(environ: Mapping[str, str]) -> float:
    """The interval that the manager named for this process; 0: it watches nobody."""
    text = environ.get("WATCHDOG_USEC", "")
    if not text.isdecimal() or not 0 < int(text) < _LONGEST_PAUSE_US:
        return 0.0
    pid = environ.get("WATCHDOG_PID", "")
    if pid and pid != str(os.getpid()):
        return 0.0
    return int(text) / 1e6
