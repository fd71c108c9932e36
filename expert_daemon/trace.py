"""Recording of routing traces while the daemon serves.

The loop's thread hands over what Touch messages say and never waits; a thread of our own writes it
twice a second. So what a killed daemon loses is half a second. A disk that fails or falls behind
costs steps of the trace, which are counted, and nothing else.
"""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path

from protocol.errors import ConfigError

from .log import log
from .routing_trace import TraceShape
from .trace_file import MAX_BYTES, TraceFile
from .trace_format import step_of_picks

FLUSH_S = 0.5
MOST_WAITING = 4096  # steps; beyond that they are dropped
CLOSE_S = 2.0


class TraceRecorder:
    """Writes one trace, from its making until `close`."""

    def __init__(self, file: TraceFile, shape: TraceShape, *, flush_s: float = FLUSH_S) -> None:
        self.n_steps = 0  # written
        self.n_dropped = 0
        self._file = file
        self._shape = shape
        self._flush_s = flush_s
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._ending = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path:
        """The file that is written."""
        return self._file.path

    @property
    def n_bytes(self) -> int:
        """Bytes of the file so far."""
        return self._file.n_bytes

    def record(self, step: int, picks: bytes) -> None:
        """Take a step's picks, (layer u16, expert u16) pairs, or count them as dropped."""
        if self._failed or len(self._waiting) >= MOST_WAITING:
            self.n_dropped += 1
        else:
            self._waiting.append((step, picks))

    def close(self) -> None:
        """Write what waits and let the file go; a disk that hangs is not waited for."""
        self._ending.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log(f"trace {self.path}: the disk does not answer, the last steps are lost")

    def _run(self) -> None:
        while not self._ending.wait(self._flush_s):
            self._write()
        self._write()
        self._file.close()

    def _write(self) -> None:
        waiting = self._waiting
        taken = [waiting.popleft() for _ in range(len(waiting))]
        if not taken or self._failed:
            self.n_dropped += len(taken)
            return
        steps = [step_of_picks(number, picks, self._shape) for number, picks in taken]
        try:
            self._file.write(steps)
        except (OSError, ConfigError) as error:
            self._failed = True
            self.n_dropped += len(steps)
            log(f"trace {self.path}: {error}; nothing more is recorded")
        else:
            self.n_steps += len(steps)


class Tracing:
    """The daemon's trace, on or off. Runs on the loop's thread."""

    def __init__(self, shape: TraceShape, max_bytes: int = MAX_BYTES) -> None:
        self._shape = shape
        self._max_bytes = max_bytes
        self._recorder: TraceRecorder | None = None

    def start(self, path: Path) -> None:
        """Record into `path` from now on; a running trace ends. Raises ConfigError."""
        if self._recorder is not None and self._recorder.path == path:
            return
        file = TraceFile(path, self._shape, max_bytes=self._max_bytes)
        self.stop()
        self._recorder = TraceRecorder(file, self._shape)
        log(f"routing trace goes to {path}")

    def stop(self) -> None:
        """End the trace, if there is one."""
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    def record(self, step: int, picks: bytes) -> None:
        """Take a Touch's picks where a trace is on."""
        if self._recorder is not None:
            self._recorder.record(step, picks)

    def values(self) -> dict[str, int | float | str]:
        """What Stats tells."""
        recorder = self._recorder
        return {
            "trace": str(recorder.path) if recorder else "",
            "trace_steps": recorder.n_steps if recorder else 0,
            "trace_steps_dropped": recorder.n_dropped if recorder else 0,
        }
