"""What `headrace pack` and `headrace verify` show while they run: a bar, or JSON lines for scripts.

Progress goes to standard error, a bar only where that is a terminal; with `--json` one object a
line goes to standard output. Threads report by `add`; one thread at a time draws.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

from protocol.sizes import format_size

DRAW_S = 0.2
JSON_S = 1.0
BAR_WIDTH = 30
RATE_SPAN_S = 10.0


class Report:
    """Progress of one command over `total` bytes."""

    def __init__(self, what: str, *, as_json: bool) -> None:
        self._what = what
        self._as_json = as_json
        self._is_live = not as_json and sys.stderr.isatty()
        self._lock = threading.Lock()
        self._total = 0
        self._done = 0
        self._kept = 0
        self._began = time.monotonic()
        self._drawn = 0.0
        self._marks: list[tuple[float, int]] = []

    @property
    def is_json(self) -> bool:
        """Whether scripts listen, not people."""
        return self._as_json

    def start(self, total: int, **facts: Any) -> None:
        """Begin to count towards `total` bytes."""
        self._total = total
        self._began = time.monotonic()
        self._marks = [(self._began, 0)]
        self.event("begin", total_bytes=total, **facts)

    def add(self, n_bytes: int, was_there: bool = False) -> None:
        """Count bytes; those that an earlier run had written do not count as work."""
        with self._lock:
            self._done += n_bytes
            self._kept += n_bytes if was_there else 0
            now = time.monotonic()
            if now - self._drawn < (JSON_S if self._as_json else DRAW_S):
                return
            self._drawn = now
            self._draw(now)

    def event(self, event: str, /, **facts: Any) -> None:
        """Write one JSON object where scripts listen."""
        if self._as_json:
            sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
            sys.stdout.flush()

    def line(self, text: str) -> None:
        """Write one line for people."""
        if self._as_json:
            return
        with self._lock:
            self._wipe()
            sys.stderr.write(text + "\n")

    def end(self) -> dict[str, Any]:
        """Take the bar away; return bytes, seconds and rate."""
        seconds = time.monotonic() - self._began
        with self._lock:
            self._wipe()
        worked = self._done - self._kept
        return {
            "bytes": self._done,
            "bytes_kept": self._kept,
            "seconds": round(seconds, 3),
            "bytes_per_s": round(worked / max(seconds, 1e-9)),
        }

    def _draw(self, now: float) -> None:
        self._marks.append((now, self._done - self._kept))
        while len(self._marks) > 2 and now - self._marks[0][0] > RATE_SPAN_S:
            self._marks.pop(0)
        (then, before), (_, after) = self._marks[0], self._marks[-1]
        rate = (after - before) / max(now - then, 1e-9)
        left_s = (self._total - self._done) / rate if rate > 0 else None
        if self._as_json:
            self.event(
                "progress",
                done_bytes=self._done,
                total_bytes=self._total,
                bytes_per_s=round(rate),
                left_s=None if left_s is None else round(left_s, 1),
            )
        elif self._is_live:
            share = self._done / max(self._total, 1)
            bar = "#" * int(share * BAR_WIDTH)
            text = (
                f"{self._what} [{bar:-<{BAR_WIDTH}}] {share:4.0%} {format_size(self._done)} of "
                f"{format_size(self._total)}, {format_size(int(rate))}/s, {_time_left(left_s)}"
            )
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()

    def _wipe(self) -> None:
        if self._is_live:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _time_left(seconds: float | None) -> str:
    if seconds is None:
        return "time left unknown"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} left" if hours else f"{minutes}:{rest:02} left"
