"""The daemon's log: one plain line an event, to standard error.

A thread of its own writes: where nobody reads standard error (a terminal that is halted, a pipe to
a pager) the loop goes on. Invariants: lines keep their order; what finds no room is counted, and
the count stands where the lines would.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import sys
import threading
import traceback
from collections import deque
from typing import TextIO

from .allowance import Allowance

CLIENT_LINES_A_MINUTE = 20
MOST_WAITING = 1000  # lines
FLUSH_S = 1.0


class LogWriter:
    """Writes texts in the order in which they came, from whatever thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # of the four below
        self._waiting: deque[tuple[TextIO, str]] = deque()
        self._n_dropped = 0  # in a row: there is room again once all that waited is written
        self._is_writing = False
        self._thread: threading.Thread | None = None

    def put(self, text: str) -> None:
        """Have a text written to what standard error is now; returns at once."""
        with self._changed:
            if self._n_dropped or len(self._waiting) >= MOST_WAITING:
                self._n_dropped += 1
                return
            self._waiting.append((sys.stderr, text))
            if self._thread is None or not self._thread.is_alive():  # as in a forked child
                self._thread = threading.Thread(target=self._run, name="log", daemon=True)
                self._thread.start()
                atexit.register(self.flush)
            self._changed.notify_all()

    def flush(self, timeout: float = FLUSH_S) -> bool:
        """Return True once everything is written, False where that takes longer."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, timeout)

    def _is_idle(self) -> bool:
        return not self._waiting and not self._is_writing

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting)
                self._is_writing = True
                stream, text = self._waiting.popleft()
                if not self._waiting and self._n_dropped:
                    left_out = f"{self._n_dropped} lines of the log were left out: nobody read it\n"
                    self._waiting.append((stream, left_out))
                    self._n_dropped = 0
            # A reader of the log that has gone is no reason to stop.
            with contextlib.suppress(OSError, ValueError):
                _write(stream, text)


def _write(stream: TextIO, text: str) -> None:
    """Write past the stream's own buffer, whose lock would keep the process's end."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # in memory
        stream.write(text)
        return
    left = text.encode(stream.encoding, "backslashreplace")
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except BlockingIOError:
            select.select([], [descriptor], [])


_writer = LogWriter()


def log(line: str) -> None:
    """Have one line written; returns at once."""
    _writer.put(line.replace("\n", " ") + "\n")


def log_bug(error: BaseException) -> None:
    """Have an exception's traceback written."""
    _writer.put("".join(traceback.format_exception(error)))


def flush(timeout: float = FLUSH_S) -> bool:
    """Return True once all that was logged is written, False where that takes longer."""
    return _writer.flush(timeout)


class ClientLog:
    """Lines that any client can bring about: so many a minute, the others are counted.

    A daemon has one, that of its server; the exporter's process has one of its own. Any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines = Allowance(CLIENT_LINES_A_MINUTE, 60.0)
        self._n_left_out = 0

    def note(self, line: str) -> None:
        """Write the line, unless there were too many lately."""
        with self._lock:
            if not self._lines.spend(1):
                self._n_left_out += 1
                return
            if self._n_left_out:
                log(f"{self._n_left_out} lines about clients were left out")
                self._n_left_out = 0
            log(line)
