"""Whether the engine may still read the arena, from its descriptor connection and its process.

Runs on the loop's thread. An engine is gone once its connection has ended and its process has too,
or once it said Bye. A connection that ended alone leaves it `absent`: work that it launched may
still read the arena, so only that process may be the engine until it has ended.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable


class EngineWatch:
    """Watches one process; calls `gone` when both its signs of life have ended."""

    def __init__(self, loop: asyncio.AbstractEventLoop, gone: Callable[[], None]) -> None:
        self._loop = loop
        self._gone = gone
        self._pidfd = -1
        self._connected = False
        self.pid = 0  # 0: nobody is watched
        self.last_pid = 0  # of the process that was watched last

    @property
    def absent(self) -> bool:
        """Whether a watched process lives on without a connection."""
        return self.pid != 0 and not self._connected

    def begin(self, pid: int, *, connected: bool) -> None:
        """Watch this process from now on, with or without a connection."""
        self.end()
        self.pid = self.last_pid = pid
        self._connected = connected
        try:
            self._pidfd = os.pidfd_open(pid)
        except (OSError, AttributeError):  # gone already, or a kernel without: its connection tells
            self._pidfd = -1
            if not connected:
                self._loop.call_soon(self._finish)
            return
        self._loop.add_reader(self._pidfd, self._process_ended)

    def disconnected(self) -> None:
        """Its connection has ended."""
        self._connected = False
        if self.pid and self._pidfd < 0:
            self._finish()

    def end(self) -> None:
        """Watch nobody."""
        self.pid = 0
        self._close()

    def _process_ended(self) -> None:
        self._close()
        if not self._connected:
            self._finish()

    def _finish(self) -> None:
        if self.pid and not self._connected:
            self.end()
            self._gone()

    def _close(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
