"""Recording of routing traces while the daemon serves.

The loop's thread hands over what Touch messages say and never waits; a recorder's own thread opens
its file, writes twice a second and closes. So what a killed daemon loses is half a second. A disk
that fails, hangs or falls behind costs steps of the trace, which are counted, and nothing else.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from protocol.errors import ConfigError

from .log import ClientLog
from .routing_trace import TraceShape
from .trace_file import MAX_BYTES, TraceFile
from .trace_format import step_of_picks

FLUSH_S = 0.5
MOST_WAITING = 4096  # steps; beyond that they are dropped
START_S = 10.0  # how long the daemon's start waits for the disk
CLOSE_S = 2.0  # how long its end does
MOST_ENDING = 4  # traces whose disks have not answered; beyond that none begins


def _nothing() -> None:
    """Tell nobody."""


class TraceRecorder:
    """Writes one trace until `end`.

    is_open       its file is there and is written; stays true
    error         why it could not begin, or goes on no longer; "": it does, or was ended
    has_answered  set when its file is open, or has proved not to open
    has_ended     set when its file is closed
    """

    def __init__(
        self,
        path: Path,
        shape: TraceShape,
        *,
        max_bytes: int = MAX_BYTES,
        after: TraceRecorder | None = None,
        changed: Callable[[], None] = _nothing,
        flush_s: float = FLUSH_S,
    ) -> None:
        """Begin to open `path`.

        after    what writes the same file and was told to end: its end is waited for, on the thread
        changed  called on the thread when the file is open, when writing fails and at the end
        """
        self.path = path
        self.n_steps = 0  # written
        self.n_dropped = 0
        self.n_bytes = 0  # of the file
        self.is_open = False
        self.error = ""
        self.has_answered = threading.Event()
        self.has_ended = threading.Event()
        self._shape = shape
        self._max_bytes = max_bytes
        self._after = after
        self._changed = changed
        self._flush_s = flush_s
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
        self._thread.start()

    @property
    def goes_on(self) -> bool:
        """Whether it opens its file or writes it."""
        return not (self.error or self._ending.is_set() or self.has_ended.is_set())

    def record(self, step: int, picks: bytes) -> None:
        """Take a step's picks, (layer u16, expert u16) pairs, or count them as dropped."""
        if not self.goes_on or len(self._waiting) >= MOST_WAITING:
            self.n_dropped += 1
        else:
            self._waiting.append((step, picks))

    def end(self, error: str = "") -> None:
        """Have what waits written and the file let go."""
        self.error = self.error or error
        self._ending.set()

    def close(self, timeout: float = CLOSE_S) -> bool:
        """End, and return whether the file was let go in time; a disk that hangs is left."""
        self.end()
        return self.has_ended.wait(timeout)

    def _run(self) -> None:
        try:
            self._wait_for_predecessor()
            if not self._ending.is_set():
                self._write_file(TraceFile(self.path, self._shape, max_bytes=self._max_bytes))
        except OSError as error:
            self.error = self.error or f"trace {self.path}: {error.strerror}"
        except ConfigError as error:
            self.error = self.error or str(error)
        except BaseException as error:
            self.error = self.error or f"trace {self.path}: {error!r}"
            raise
        finally:
            self.has_answered.set()
            self.has_ended.set()
            self.n_dropped += len(self._waiting)
            self._waiting.clear()
            self._changed()

    def _wait_for_predecessor(self) -> None:
        after, self._after = self._after, None
        while after is not None and not after.has_ended.wait(FLUSH_S):
            if self._ending.is_set():
                return

    def _write_file(self, file: TraceFile) -> None:
        self.n_bytes = file.n_bytes
        self.is_open = True
        self.has_answered.set()
        self._changed()
        try:
            while not self._ending.wait(self._flush_s):
                self._write(file)
            self._write(file)
        finally:
            file.close()

    def _write(self, file: TraceFile) -> None:
        waiting = self._waiting
        taken = [waiting.popleft() for _ in range(len(waiting))]
        if not taken:
            return
        steps = [step_of_picks(number, picks, self._shape) for number, picks in taken]
        try:
            file.write(steps)
        except (OSError, ConfigError):
            self.n_dropped += len(steps)
            raise
        self.n_steps += len(steps)
        self.n_bytes = file.n_bytes


class Tracing:
    """The daemon's trace, on or off. Runs on the loop's thread and waits in `start` and `close`.

    Invariants: at most one recorder records, and at most one opens its file, to take its place; at
    most MOST_ENDING others have yet to let go of theirs.
    """

    def __init__(self, shape: TraceShape, max_bytes: int = MAX_BYTES) -> None:
        self.on_change: Callable[[], None] = _nothing  # on any thread: `look` has something to see
        self.clients = ClientLog()  # the server's own, once there is a server
        self._shape = shape
        self._max_bytes = max_bytes
        self._recorder: TraceRecorder | None = None
        self._next: TraceRecorder | None = None
        self._ending: list[TraceRecorder] = []
        self._told = False  # that the recorder has failed

    def start(self, path: Path) -> None:
        """Record into `path` from now on, once its disk has answered. Raises ConfigError."""
        recorder = self.begin(path)
        recorder.has_answered.wait(START_S)
        self.look()
        self.give_up(recorder)
        if recorder.error:
            raise ConfigError(recorder.error)

    def begin(self, path: Path) -> TraceRecorder:
        """Return what will record into `path` once its file is open, see `look`.

        What records now goes on until then. Raises ConfigError where it cannot be tried.
        """
        self.look()
        for one in (self._next, self._recorder):
            if one is not None and one.path == path and one.goes_on:
                return one
        if self._next is not None:
            raise ConfigError(f"trace {self._next.path} is being opened, wait for its disk")
        self._forget_ended()
        if len(self._ending) >= MOST_ENDING:
            raise ConfigError(f"trace {path}: the disks of {MOST_ENDING} others do not answer")
        former = [one for one in (self._recorder, *self._ending) if one is not None]
        self._next = TraceRecorder(
            path,
            self._shape,
            max_bytes=self._max_bytes,
            after=next((one for one in former if one.path == path), None),
            changed=self._has_changed,
        )
        return self._next

    def _has_changed(self) -> None:
        self.on_change()

    def look(self) -> None:
        """Have what has opened its file record, and what it replaces end; tell of a failure."""
        candidate = self._next
        if candidate is not None and candidate.is_open:
            self._end(self._recorder)
            self._recorder, self._next, self._told = candidate, None, False
            self.clients.note(f"routing trace goes to {candidate.path}")
        elif candidate is not None and candidate.has_ended.is_set():
            self._next = None
        recorder = self._recorder
        if recorder is not None and recorder.error and not self._told:
            self._told = True
            self.clients.note(f"{recorder.error}; nothing more is recorded")

    def give_up(self, recorder: TraceRecorder) -> None:
        """End what has not opened its file by now; its error says so."""
        if recorder is self._next:
            self._next = None
            self._end(recorder, f"trace {recorder.path}: the disk does not answer")

    def stop(self) -> TraceRecorder | None:
        """End the trace, if there is one, and return what then has to let go of its file."""
        self.look()
        candidate, recorder = self._next, self._recorder
        self._next = self._recorder = None
        self._end(candidate, "the trace was turned off before it began")
        self._end(recorder)
        return recorder or candidate

    def close(self) -> None:
        """End the trace and wait until it is on the disk; a disk that hangs is not waited for."""
        self.stop()
        ends = time.monotonic() + CLOSE_S
        for one in self._ending:
            if not one.close(max(0.0, ends - time.monotonic())):
                text = f"trace {one.path}: the disk does not answer, the last steps are lost"
                self.clients.note(text)

    def _end(self, recorder: TraceRecorder | None, error: str = "") -> None:
        if recorder is not None:
            recorder.end(error)
            self._forget_ended()
            self._ending.append(recorder)

    def _forget_ended(self) -> None:
        self._ending = [one for one in self._ending if not one.has_ended.is_set()]

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
            "trace_error": recorder.error if recorder else "",
        }
