"""Threads that run the units of outputs, in order, and finish an output after its last unit.

Invariants: units are begun in order, several at a time; an output is finished by the thread that
ended its last unit, while others go on with the next one. The first failure stops all of them, and
what was written is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from protocol.files.pack_manifest import PackFile

from .outputs import Output, Site
from .source_files import Scratch

POLL_S = 0.2


class Workers:
    """Runs `outputs` with `n_threads` threads.

    on_bytes     called with the bytes of each unit and whether they were there before
    on_finished  called with an output and its files, by one thread at a time
    """

    def __init__(
        self,
        outputs: Sequence[Output],
        site: Site,
        scratch: Callable[[], Scratch],
        on_bytes: Callable[[int, bool], None],
        on_finished: Callable[[Output, list[PackFile]], None],
    ) -> None:
        self._waiting = list(reversed(outputs))
        self._site = site
        self._scratch = scratch
        self._on_bytes = on_bytes
        self._on_finished = on_finished
        self._lock = threading.Lock()
        self._finish_lock = threading.Lock()
        self._current: tuple[Output, int] | None = None  # and its next unit
        self._n_left: dict[str, int] = {}
        self._open: dict[str, Output] = {}
        self._failure: BaseException | None = None
        self._stop = False

    def run(self, n_threads: int) -> None:
        """Return when everything is finished; raises what the first failing unit raised."""
        threads = [
            threading.Thread(target=self._work, name=f"pack-{number}", daemon=True)
            for number in range(n_threads)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(POLL_S)
        finally:
            self._stop = True
            for thread in threads:
                thread.join()
            for output in self._open.values():
                output.close()
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        try:
            scratch = self._scratch()
            while (job := self._next()) is not None:
                output, unit = job
                if unit >= 0:
                    self._on_bytes(*output.run(unit, scratch))
                if self._is_last(output):
                    self._finish(output)
        except BaseException as failure:  # noqa: BLE001 - handed to the thread that waits
            with self._lock:
                self._failure = self._failure or failure
            self._stop = True

    def _next(self) -> tuple[Output, int] | None:
        """Return an output and its next unit, -1 for an output without any."""
        with self._lock:
            if self._stop:
                return None
            if self._current is None:
                if not self._waiting:
                    return None
                output = self._waiting.pop()
                self._open[output.name] = output
                output.open(self._site)
                self._n_left[output.name] = max(1, output.n_units)
                if output.n_units == 0:
                    return output, -1
                self._current = (output, 0)
            output, unit = self._current
            self._current = (output, unit + 1) if unit + 1 < output.n_units else None
            return output, unit

    def _is_last(self, output: Output) -> bool:
        with self._lock:
            self._n_left[output.name] -= 1
            return self._n_left[output.name] == 0

    def _finish(self, output: Output) -> None:
        with self._finish_lock:
            files = output.finish()
            self._on_finished(output, files)
            output.note_finished()
        with self._lock:
            del self._open[output.name]
