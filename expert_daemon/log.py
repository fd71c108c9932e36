"""The daemon's log: one plain line an event, to standard error."""

from __future__ import annotations

import contextlib
import sys


def log(line: str) -> None:
    """Write one line; a reader of the log that has gone is no reason to stop."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(line.replace("\n", " ") + "\n")
        sys.stderr.flush()
