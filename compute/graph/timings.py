"""Where a token's time went, part by part; only where it was asked for.

Parts on the device are measured between two marks on the CUDA stream, parts of the host by the
clock. Nothing waits for a mark but who waits for the headers anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

DEVICE_PARTS = ("attention", "compute", "sampling")
PARTS = ("route", "fetch", "compute", "attention", "engram", "sampling")

Mark = float | torch.cuda.Event


class StepTimer:
    """Sums a step's parts and writes a line a step.

    route      waiting for headers and picks beyond the device's own work, and reading them
    fetch      waiting for experts
    compute    routers, experts and shared experts on the device
    attention  attention, compressed rows and indexer, and what an Engram adds, on the device
    engram     waiting for Engram rows
    sampling   the logits and an id of them on the device, and reading logits
    """

    def __init__(self, device: torch.device, write: Callable[[str], None]) -> None:
        self._is_cuda = device.type == "cuda"
        self._write = write
        self._spare: list[torch.cuda.Event] = []
        self._marks: list[tuple[str, Mark, Mark]] = []
        self._sums = dict.fromkeys(PARTS, 0.0)
        self._began = time.perf_counter()
        self._position = -1

    def begin(self, position: int) -> None:
        """Begin a token; the one before has been sampled by now, its line is written."""
        self.finish()
        self._position = position
        self._sums = dict.fromkeys(PARTS, 0.0)
        self._began = time.perf_counter()

    def finish(self) -> None:
        """Write the line of the token that was begun."""
        if self._position < 0:
            return
        total = 1000 * (time.perf_counter() - self._began)
        parts = ", ".join(f"{name} {1000 * self._sums[name]:.3f}" for name in PARTS)
        other = total - 1000 * sum(self._sums.values())
        self._write(
            f"timings: position {self._position}: {total:.3f} ms: {parts}, other {other:.3f}"
        )
        self._position = -1

    def drop(self) -> None:
        """The token that was begun came to nothing: no line, and its marks count nowhere."""
        self._forget_marks()
        self._position = -1

    @contextmanager
    def launched(self, part: str) -> Iterator[None]:
        """Mark what the block launches."""
        before = self._mark()
        yield
        self._marks.append((part, before, self._mark()))

    @contextmanager
    def on_host(self, part: str) -> Iterator[None]:
        """Count the block's time."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._sums[part] += time.perf_counter() - began

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count a wait for headers: what the device's marks do not explain is `route`."""
        began = time.perf_counter()
        yield
        waited = time.perf_counter() - began
        on_device = 0.0
        for part, before, after in self._marks:
            took = _between(before, after)
            self._sums[part] += took
            on_device += took
        if self._is_cuda:  # on the CPU nothing is left to wait for
            waited = max(0.0, waited - on_device)
        self._sums["route"] += waited
        self._forget_marks()

    def _forget_marks(self) -> None:
        for _, before, after in self._marks:
            self._spare += [mark for mark in (before, after) if not isinstance(mark, float)]
        self._marks.clear()

    def _mark(self) -> Mark:
        if not self._is_cuda:
            return time.perf_counter()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _between(before: Mark, after: Mark) -> float:
    if isinstance(before, float) or isinstance(after, float):
        assert isinstance(before, float)
        assert isinstance(after, float)
        return after - before
    return float(before.elapsed_time(after)) / 1000
