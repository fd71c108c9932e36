"""Launches recorded once and replayed, and what their pointers were.

On a GPU a recording is a CUDA graph, captured on a CUDA stream of its own while the step itself
runs eagerly: capturing executes nothing. On the CPU it is the launches themselves, so that all that
stands around graphs is tested without a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch

from protocol.errors import CaptureError

_LOG = logging.getLogger("headrace.graph")

Launch = Callable[[], None]


@dataclass(slots=True)
class GraphCounters:
    """How often what happened, since the start."""

    eager: int = 0  # parts launched one kernel after the other
    captures: int = 0
    replays: int = 0
    recaptures: int = 0  # recordings thrown away: their pointers had changed
    misses: int = 0  # layers that ran again because a pick was absent
    failures: int = 0  # captures that failed
    routes_checked: int = 0  # decisions compared with the host's, one each time a layer ran
    hints: int = 0  # experts foreseen and told to the daemon
    reasons: dict[str, int] = field(default_factory=dict)  # of recaptures: what had changed

    @property
    def launches(self) -> int:
        """Parts launched, in either way."""
        return self.eager + self.replays

    def line(self) -> str:
        """Return the counts in one line."""
        changed = ", ".join(f"{name} {count}" for name, count in sorted(self.reasons.items()))
        return (
            f"graphs: {self.launches} launches, {self.replays} replays, {self.eager} eager, "
            f"{self.misses} layers repeated, {self.captures} captures, {self.recaptures} recaptures"
            f"{f' ({changed})' if changed else ''}, {self.failures} failures"
            f"{f', {self.routes_checked} routes checked' if self.routes_checked else ''}"
            f"{f', {self.hints} hints' if self.hints else ''}"
        )

    def values(self) -> dict[str, int]:
        """Return the counts by name."""
        return {
            "launches": self.launches,
            "eager": self.eager,
            "captures": self.captures,
            "replays": self.replays,
            "recaptures": self.recaptures,
            "misses": self.misses,
            "failures": self.failures,
            "routes_checked": self.routes_checked,
            "hints": self.hints,
        }


class Recorder:
    """Keeps recordings by key; all of them go when the pointers that they bake in change.

    keeps  whether recordings are used on after a capture has failed; else all goes eagerly
    """

    def __init__(
        self, device: torch.device, counters: GraphCounters, *, keeps: bool = True
    ) -> None:
        self._device = device
        self._counters = counters
        self._keeps = keeps
        self._recordings: dict[Hashable, Launch] = {}
        self._pointers: dict[str, tuple[int, ...]] = {}
        self.works = True
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()

    def check(self, what: str, pointers: tuple[int, ...]) -> None:
        """Compare what the recordings bake in of a kind with what is true now."""
        if pointers == self._pointers.get(what):
            return
        self._pointers[what] = pointers
        n = len(self._recordings)
        if n:
            self._counters.recaptures += n
            self._counters.reasons[what] = self._counters.reasons.get(what, 0) + n
            _LOG.debug("%d graphs are recorded anew: %s changed", n, what)
            self._recordings.clear()

    def run(self, key: Hashable, launch: Launch) -> None:
        """Replay what was recorded under `key`; else launch eagerly, and record it meanwhile."""
        recorded = self._recordings.get(key)
        if recorded is not None:
            self._counters.replays += 1
            recorded()
            return
        self._counters.eager += 1
        launch()
        if self.works:
            try:
                self._recordings[key] = self._captured(launch)
            except CaptureError as error:
                self._give_up(error)
            else:
                self._counters.captures += 1

    def _give_up(self, error: CaptureError) -> None:
        self._counters.failures += 1
        self.works = False
        if self._keeps:
            ends = "going on without new ones"
        else:
            ends = "segments are off, tokens go by single launches"
            self._recordings.clear()
        _LOG.warning("a CUDA graph could not be captured, %s: %s", ends, error)

    def _captured(self, launch: Launch) -> Launch:
        """Record a launch. Raises CaptureError."""
        if self._device.type != "cuda":
            return launch
        current = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                launch()
        except (RuntimeError, torch.AcceleratorError) as error:
            torch.cuda.set_stream(current)  # a capture that fails leaves its own behind
            raise CaptureError(str(error).splitlines()[0]) from error
        return graph.replay
