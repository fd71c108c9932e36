"""The host's copy of the arena's table: which slot holds each key, and as of which version.

Owns `slots` and `version`. Invariants: a change is applied only when it continues what was applied
before, so the table is always the daemon's table of one version; after a gap nothing is applied
until `reset`. One thread uses it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from protocol.errors import ProtocolError
from protocol.wire.messages import Change, Welcome


class SlotTable:
    """`slots[layer][expert]` is the arena slot of a key, -1 where the arena does not hold it."""

    def __init__(self) -> None:
        self.slots: list[list[int]] = []
        self.version = -1
        self._changed: set[tuple[int, int]] | None = None  # None: any key may have

    def reset(self, welcome: Welcome) -> None:
        """Take the whole table that the daemon sent."""
        shape = (welcome.n_layers, welcome.n_experts)
        table = np.frombuffer(welcome.table, "<i4")
        if table.size != shape[0] * shape[1]:
            raise ProtocolError(f"table has {table.size} entries, wanted {shape[0]} x {shape[1]}")
        if table.size and not -1 <= table.min() <= table.max() < welcome.n_slots:
            raise ProtocolError(f"table names a slot outside 0 .. {welcome.n_slots - 1}")
        self.slots = table.reshape(shape).tolist()
        self.version = welcome.version
        self._changed = None

    def clear(self) -> None:
        """Forget every entry: until the next `reset` the arena counts as empty."""
        self.slots = [[-1] * len(row) for row in self.slots]
        self.version = -1
        self._changed = None

    def apply(self, from_version: int, to_version: int, changes: Iterable[Change]) -> bool:
        """Apply the final state of every key changed after `from_version`.

        Returns False at a gap, where only a Resync helps; True when the table is now at least at
        `to_version`, also where it already was.
        """
        if from_version > self.version:
            return False
        if to_version > self.version:
            for layer, expert, slot in changes:
                self.slots[layer][expert] = slot
                if self._changed is not None:
                    self._changed.add((layer, expert))
            self.version = to_version
        return True

    def take_changed(self) -> set[tuple[int, int]] | None:
        """Return the keys changed since the last call; None where any may have."""
        changed, self._changed = self._changed, set()
        return changed
