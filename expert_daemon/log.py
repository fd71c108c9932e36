"""The daemon's log: one plain line an event, to standard error."""

from __future__ import annotations

import contextlib
import sys

from .allowance import Allowance

CLIENT_LINES_A_MINUTE = 20


def log(line: str) -> None:
    """Write one line; a reader of the log that has gone is no reason to stop."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(line.replace("\n", " ") + "\n")
        sys.stderr.flush()


class ClientLog:
    """Lines that any client can bring about: so many a minute, the others are counted."""

    def __init__(self) -> None:
        self._lines = Allowance(CLIENT_LINES_A_MINUTE, 60.0)
        self._n_left_out = 0

    def note(self, line: str) -> None:
        """Write the line, unless there were too many lately."""
        if not self._lines.spend(1):
            self._n_left_out += 1
            return
        if self._n_left_out:
            log(f"{self._n_left_out} lines about clients were left out")
            self._n_left_out = 0
        log(line)
