"""Reads under way: one a slot, from LOADING to whatever the read's return makes of it.

A slot stays LOADING until its read has returned, whatever was cancelled or given up meanwhile. A
read publishes only if its slot still has the generation that it started with. A slow read may get a
twin in another slot: the first of the two that is whole publishes, the other never does.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from .counters import CacheCounters
from .outcome import Load, Purpose
from .residents import Residents
from .retirement import RetireQueue
from .slots import SlotBook


@dataclass(slots=True)
class Flight:
    """One read. `left` is the version in which the slot's old key left the table, 0: was FREE."""

    load: Load
    key: int
    left: int


class Flights:
    """The LOADING slots and the keys that they are to hold."""

    def __init__(
        self, book: SlotBook, residents: Residents, retired: RetireQueue, counters: CacheCounters
    ) -> None:
        self._book = book
        self._residents = residents
        self._retired = retired
        self._counters = counters
        self._of_slot: dict[int, Flight] = {}
        self._of_key: dict[int, Flight] = {}  # without those disowned
        self._twins: dict[int, Flight] = {}  # second reads of keys that are in _of_key

    def __len__(self) -> int:
        return len(self._of_slot)

    @property
    def keys(self) -> frozenset[int]:
        """Keys that a read may still publish."""
        return frozenset(self._of_key)

    @property
    def slots(self) -> frozenset[int]:
        """Slots with a read outstanding."""
        return frozenset(self._of_slot)

    def load_of(self, key: int) -> Load | None:
        """The read that will publish `key`, if one is under way."""
        flight = self._of_key.get(key)
        return None if flight is None else flight.load

    def any_but(self, keys: AbstractSet[int]) -> bool:
        """Whether a read of a key outside `keys` may still publish."""
        return any(key not in keys for key in self._of_key)

    def begin(self, key: int, slot: int, purpose: Purpose) -> Load:
        """Turn a FREE or READY slot into a LOADING one of `key`; the read may start after it."""
        assert key not in self._of_key, f"key {key} is being read already"
        evicted = self._book.key[slot]
        left = self._book.to_loading(slot, key)
        if left:
            self._residents.evict(evicted)
            self._counters.n_evictions += 1
        self._counters.n_loads += 1
        layer, expert = divmod(key, self._book.n_experts)
        load = Load(slot, layer, expert, self._book.generation[slot], purpose)
        self._of_slot[slot] = self._of_key[key] = Flight(load, key, left)
        return load

    def may_publish(self, load: Load) -> bool:
        """Whether the read is outstanding and was not disowned."""
        outstanding = load.slot in self._of_slot
        return outstanding and load.generation == self._book.generation[load.slot]

    def may_hedge(self, load: Load) -> bool:
        """Whether the read may publish and is its key's only one."""
        key = load.layer * self._book.n_experts + load.expert
        return self.may_publish(load) and key not in self._twins

    def hedge(self, load: Load, slot: int) -> Load:
        """Turn a FREE slot into a LOADING one for a second read of the same key."""
        key = self._outstanding(load).key
        self._book.to_loading(slot, key)
        self._counters.n_loads += 1
        self._counters.n_hedges += 1
        twin = Load(slot, load.layer, load.expert, self._book.generation[slot], load.purpose)
        self._of_slot[slot] = self._twins[key] = Flight(twin, key, 0)
        return twin

    def disown(self, load: Load) -> int | None:
        """The read may not publish any more; return its key unless another read may publish it."""
        flight = self._outstanding(load)
        if not self.may_publish(load):
            return None
        self._book.raise_generation(load.slot)
        if self._leave(flight) is not None:
            return None
        self._residents.miss(flight.key)
        return flight.key

    def land(self, load: Load, checksum: int | None) -> int | None:
        """The read has returned, whole if a checksum is given; return the key that this decides.

        The key is READY where it was whole and not disowned, else the slot goes to FREE or
        RETIRING, depending on where it came from. None: disowned, or a second read of the key goes
        on after this one failed.
        """
        flight = self._outstanding(load)
        owned = self.may_publish(load)
        del self._of_slot[load.slot]
        other = self._leave(flight) if owned else None
        if owned and checksum is not None:
            if other is not None:
                self._book.raise_generation(other.load.slot)
                self._leave(other)
            self._publish(flight, checksum)
            return flight.key
        self._give_back(flight)
        self._counters.n_failed += owned
        self._counters.n_discarded += not owned
        if not owned or other is not None:
            return None
        self._residents.miss(flight.key)
        return flight.key

    def _leave(self, flight: Flight) -> Flight | None:
        """Take a flight from its key; return the key's other one, the first from now on."""
        key = flight.key
        twin = self._twins.pop(key, None)
        if twin is flight:
            return self._of_key[key]
        if twin is None:
            del self._of_key[key]
        else:
            self._of_key[key] = twin
        return twin

    def _give_back(self, flight: Flight) -> None:
        slot = flight.load.slot
        if flight.left:
            self._retired.add(slot, self._book.to_retiring(slot, flight.left))
        else:
            self._book.to_free(slot)

    def _publish(self, flight: Flight, checksum: int) -> None:
        key = flight.key
        self._counters.n_published += 1
        self._residents.admit(key)
        self._book.to_ready(flight.load.slot, checksum, *self._residents.figures(key))

    def _outstanding(self, load: Load) -> Flight:
        flight = self._of_slot.get(load.slot)
        assert flight is not None, f"{load} has returned already"
        assert flight.load == load, f"{load} has returned already"
        return flight
