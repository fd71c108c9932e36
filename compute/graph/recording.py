"""Launches recorded once and replayed, and what their pointers were.

On a GPU a recording is a CUDA graph, captured on a CUDA stream of its own while the step itself
runs eagerly: capturing executes nothing. On the CPU it is the launches themselves, so that all that
stands around graphs is tested without a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

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

    def line(self) -> str:
        """Return the counts in one line."""
        return (
            f"graphs: {self.replays} replays, {self.eager} eager, {self.misses} layers repeated, "
            f"{self.captures} captures, {self.recaptures} recaptures, {self.failures} failures"
        )


class Recorder:
    """Keeps recordings by key; all of them go when the pointers that they bake in change."""

    def __init__(self, device: torch.device, counters: GraphCounters) -> None:
        self._device = device
        self._counters = counters
        self._recordings: dict[Hashable, Launch] = {}
        self._pointers: tuple[int, ...] = ()
        self.works = True
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()

    def check(self, pointers: tuple[int, ...]) -> None:
        """Compare what the recordings bake in with what is true now."""
        if pointers == self._pointers:
            return
        if self._recordings:
            self._counters.recaptures += len(self._recordings)
            _LOG.debug("%d graphs are recorded anew: their pointers changed", len(self._recordings))
            self._recordings.clear()
        self._pointers = pointers

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
            self._record(key, launch)

    def _record(self, key: Hashable, launch: Launch) -> None:
        try:
            self._recordings[key] = self._captured(launch)
        except (RuntimeError, torch.AcceleratorError) as error:
            self._counters.failures += 1
            self.works = False
            reason = str(error).splitlines()[0]
            _LOG.warning(
                "a CUDA graph could not be captured, going on without new ones: %s", reason
            )
            return
        self._counters.captures += 1

    def _captured(self, launch: Launch) -> Launch:
        if self._device.type != "cuda":
            return launch
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            launch()
        return graph.replay
