"""Versions of the slot table and the final state of every key changed after one of them.

Each change raises the version by one. A key stands in the log once, at its last change, so the
log is as long as the number of keys that changed, and never longer than its limit.
"""

from __future__ import annotations

from collections import OrderedDict

from .outcome import RequestRefused, TableChanges


class VersionLog:
    """What changed when. A table at version `first` needs no log to be known."""

    def __init__(self, n_experts: int, first: int, limit: int) -> None:
        self._n_experts = n_experts
        self._limit = limit
        self._current = first
        self._floor = first  # changes up to this version are forgotten
        self._last: OrderedDict[int, tuple[int, int]] = OrderedDict()  # key: (version, slot)

    @property
    def current(self) -> int:
        """The table's version."""
        return self._current

    def record(self, key: int, slot: int) -> int:
        """Note that `key` is at `slot` (-1: nowhere) from the next version on, and return that."""
        self._current += 1
        self._last[key] = (self._current, slot)
        self._last.move_to_end(key)
        if len(self._last) > self._limit:
            _, (self._floor, _) = self._last.popitem(last=False)
        return self._current

    def since(self, from_version: int) -> TableChanges:
        """The final state of every key changed after `from_version`, ascending by key.

        Where the log does not reach back that far the answer starts later, which the engine sees
        as a gap. Raises RequestRefused for a version that does not exist yet.
        """
        if from_version > self._current:
            raise RequestRefused(
                "malformed",
                f"table version {from_version} was applied, the table is at {self._current}",
            )
        if from_version == self._current:
            return TableChanges(from_version, from_version, ())
        start = max(from_version, self._floor)
        changed: list[tuple[int, int]] = []
        for key in reversed(self._last):
            version, slot = self._last[key]
            if version <= start:
                break
            changed.append((key, slot))
        changes = tuple((*divmod(key, self._n_experts), slot) for key, slot in sorted(changed))
        return TableChanges(start, self._current, changes)
