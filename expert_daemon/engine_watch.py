"""Whether the engine may still read the arena, from its descriptor connection and its process.

Runs on the loop's thread. An engine is gone once its connection has ended and its process has too,
or once it said Bye. A connection that ended alone leaves it `absent`: work that it launched may
still read the arena, so only that process may be the engine until it has ended. Where the system
refuses to tell when it ends, as without a descriptor left, it is looked for now and then.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

LOOK_AGAIN_S = 0.5


class EngineWatch:
    """Watches one process; calls `gone` when both its signs of life have ended."""

    def __init__(self, loop: asyncio.AbstractEventLoop, gone: Callable[[], None]) -> None:
        self._loop = loop
        self._gone = gone
        self._pidfd = -1
        self._next_look: asyncio.TimerHandle | None = None
        self._has_ended = False
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
        self._has_ended = False
        self._look()

    def disconnected(self) -> None:
        """Its connection has ended."""
        self._connected = False
        if self._has_ended:
            self._finish()

    def end(self) -> None:
        """Watch nobody."""
        self.pid = 0
        self._close()

    def _look(self) -> None:
        """Have the loop tell when the process ends, or look again later."""
        self._next_look = None
        if not _exists(self.pid):
            self._next_look = self._loop.call_later(0, self._process_ended)
            return
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except (OSError, AttributeError):  # no descriptors left, or a kernel without
            self._next_look = self._loop.call_later(LOOK_AGAIN_S, self._look)
            return
        self._loop.add_reader(self._pidfd, self._process_ended)

    def _process_ended(self) -> None:
        self._close()
        self._has_ended = True
        if not self._connected:
            self._finish()

    def _finish(self) -> None:
        if self.pid and not self._connected:
            self.end()
            self._gone()

    def _close(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1


def _exists(pid: int) -> bool:
    """Whether there is such a process; takes no descriptor."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True
