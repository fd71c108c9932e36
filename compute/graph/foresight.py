"""Hints: experts that layers behind a segment may want, told to the daemon before they run."""

from __future__ import annotations

from compute.experts.device_experts import DeviceExperts

from .look_ahead import LookAhead
from .recording import GraphCounters


class Foresight:
    """Tells each absent expert that is foreseen once a token.

    reach  layers that are guessed from one layer's input
    """

    def __init__(
        self, ahead: LookAhead, experts: DeviceExperts, reach: int, counters: GraphCounters
    ) -> None:
        self._ahead = ahead
        self._experts = experts
        self._reach = reach
        self._counters = counters
        self._told: set[tuple[int, int]] = set()

    def begin(self) -> None:
        """Begin a token."""
        self._told.clear()

    def tell(self, source: int, end: int) -> None:
        """Hint what the layers from `end` on would pick of the input of `source`."""
        table = self._experts.places.host_table
        for layer in range(end, min(source + self._reach + 1, len(table))):
            absent = [
                expert
                for expert in self._ahead.guessed(source, layer - source)
                if table[layer, expert] < 0 and (layer, expert) not in self._told
            ]
            if absent:
                self._experts.hint(layer, absent)
                self._told |= {(layer, expert) for expert in absent}
                self._counters.hints += len(absent)
