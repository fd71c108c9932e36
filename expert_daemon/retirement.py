"""Slots that wait until the device can no longer name them.

A RETIRING slot passes two gates. The engine's table must have reached the version in which the
slot's key left it; and every launch that began before that was acknowledged must have ended, for
it may have read the older table.
"""

from __future__ import annotations

import heapq
from collections import deque


class RetireQueue:
    """The RETIRING slots of one engine, in the order in which they come free."""

    def __init__(self) -> None:
        self._named: list[tuple[int, int]] = []  # heap of (version, slot): in the device's table
        self._read: deque[tuple[int, int, int]] = deque()  # (epoch, slot, version): in a launch
        self._applied = -1
        self._launched = 0
        self._done = 0

    def __len__(self) -> int:
        return len(self._named) + len(self._read)

    @property
    def applied(self) -> int:
        """The highest table version that the engine acknowledged, -1 = none."""
        return self._applied

    def slots(self) -> list[int]:
        """All slots here."""
        return [slot for _, slot in self._named] + [slot for _, slot, _ in self._read]

    def new_engine(self) -> None:
        """Another engine: nothing is acknowledged and its launches count from 0."""
        self._named += [(version, slot) for _, slot, version in self._read]
        heapq.heapify(self._named)
        self._read.clear()
        self._applied, self._launched, self._done = -1, 0, 0

    def add(self, slot: int, version: int) -> None:
        """`slot`'s key left the table in `version`."""
        heapq.heappush(self._named, (version, slot))
        self._pass_first_gate()

    def ack(self, applied: int, epoch_done: int, epoch_launched: int) -> None:
        """Note what an engine says; older figures than those known change nothing."""
        self._applied = max(self._applied, applied)
        self._launched = max(self._launched, epoch_launched)
        self._done = max(self._done, epoch_done)
        self._pass_first_gate()

    def take_free(self) -> list[int]:
        """Remove and return the slots that nothing can name any more."""
        free: list[int] = []
        while self._read and self._read[0][0] <= self._done:
            free.append(self._read.popleft()[1])
        return free

    def take_all(self) -> list[int]:
        """Remove and return every slot: there is no engine."""
        slots = self.slots()
        self._read.clear()
        self._named.clear()
        return slots

    def _pass_first_gate(self) -> None:
        while self._named and self._named[0][0] <= self._applied:
            version, slot = heapq.heappop(self._named)
            self._read.append((self._launched, slot, version))
