"""The slots' states, the slot table and the headers: the only writer of all three.

Every method is one legal edge of the state machine and stores in the order that a killed daemon's
successor relies on: the table entry to -1 before the header changes, LOADING before the first byte
may be written, READY last. What the arrays say is mirrored in Python lists for speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.arena.layout import SlotState

from .versions import VersionLog

FREE, LOADING, READY, RETIRING = (
    SlotState.FREE,
    SlotState.LOADING,
    SlotState.READY,
    SlotState.RETIRING,
)


@dataclass(frozen=True, slots=True)
class SlotRooms:
    """Which slots an expert may take: those of its layer's room, and those of room 0."""

    of_slot: Sequence[int]
    of_layer: Sequence[int]


class SlotBook:
    """State, key and generation of each slot; `slot_of` holds the READY keys.

    FREE slots are kept by room; a room is the size of a slot, of which most models have one.
    """

    def __init__(
        self,
        table: NDArray[np.int32],
        headers: NDArray[Any],
        *,
        versions: VersionLog,
        sequence: NDArray[np.uint64] | None,
        version_word: NDArray[np.uint64] | None,
        n_usable: int | None = None,
        rooms: SlotRooms | None = None,
    ) -> None:
        """Mirror what the headers say; `reset` or `adopt` makes that consistent.

        rooms  None: every slot takes any expert
        """
        self.n_experts: int = table.shape[1]
        self.table = table
        self.headers = headers
        self.versions = versions
        self.state: list[int] = headers["state"].tolist()
        self.generation: list[int] = headers["generation"].tolist()
        self.key: list[int] = [-1] * len(headers)
        self.slot_of: dict[int, int] = {}
        rooms = rooms or SlotRooms((0,) * len(headers), (0,) * table.shape[0])
        self.room = rooms.of_slot
        self._layer_room = rooms.of_layer
        self.n_rooms = 1 + max(rooms.of_layer)
        self._free: list[list[int]] = [[] for _ in range(self.n_rooms)]  # of the first n_usable
        self.n_usable = len(headers) if n_usable is None else n_usable
        self._closing_end = self.n_usable
        self._sequence = np.zeros(1, np.uint64) if sequence is None else sequence
        self._version_word = np.zeros(1, np.uint64) if version_word is None else version_word
        self._column = {name: headers[name] for name in headers.dtype.names or ()}

    def __len__(self) -> int:
        return len(self.state)

    def reset(self) -> None:
        """Make every slot FREE and every table entry -1; generations go on."""
        self.headers["state"] = FREE
        self.state = [int(FREE)] * len(self)
        self._set_free(range(self.n_usable))
        self._write_table({})

    def adopt(self, *, free_others: bool) -> list[int]:
        """Keep the READY slots, rebuild the table from them, return the slots now RETIRING.

        Of two READY slots with one key the newer version stays, then the newer generation.
        """
        ready: dict[int, int] = {}
        for slot in sorted(self._found_ready(), key=self._age):
            ready[self._key_in_header(slot)] = slot
        kept = set(ready.values())
        others = [slot for slot in range(self.n_usable) if slot not in kept]
        for slot in range(len(self)):
            if slot not in kept:
                is_free = free_others or slot >= self.n_usable
                self._column["version"][slot] = self.versions.current
                self._set_state(slot, FREE if is_free else RETIRING)
        self.slot_of = ready
        for key, slot in ready.items():
            self.key[slot] = key
        self._set_free(others if free_others else [])
        self._write_table(ready)
        return [] if free_others else others

    def to_loading(self, slot: int, key: int) -> int:
        """FREE or READY to LOADING of `key`; return the version in which the old key left, or 0."""
        version = 0
        if self.state[slot] == READY:
            version = self._unname(slot)
        else:
            assert self.state[slot] == FREE, f"slot {slot} is {self.state[slot]}, not FREE"
        self._set_state(slot, LOADING)
        self.raise_generation(slot)
        column = self._column
        column["layer"][slot], column["expert"][slot] = divmod(key, self.n_experts)
        column["checksum"][slot] = 0
        column["version"][slot] = version
        self.key[slot] = key
        return version

    def raise_generation(self, slot: int) -> None:
        """From now on nothing that began with the slot's former generation may publish."""
        self.generation[slot] += 1
        self._column["generation"][slot] = self.generation[slot]

    def to_ready(self, slot: int, checksum: int, score: float, last_use: int) -> None:
        """LOADING to READY; the slot's key stands in the table now."""
        assert self.state[slot] == LOADING, f"slot {slot} is {self.state[slot]}, not LOADING"
        key = self.key[slot]
        assert key not in self.slot_of, f"key {key} is READY in slot {self.slot_of[key]} already"
        column = self._column
        column["checksum"][slot] = checksum
        column["score"][slot] = score
        column["last_use"][slot] = last_use
        column["version"][slot] = self.versions.current + 1
        self._set_state(slot, READY)
        self.slot_of[key] = slot
        self._name(key, slot)

    def to_retiring(self, slot: int, version: int = 0) -> int:
        """READY or LOADING to RETIRING; return the version in which the slot's key left the table.

        version  of a LOADING slot, what `to_loading` returned
        """
        if self.state[slot] == READY:
            version = self._unname(slot)
        else:
            assert self.state[slot] == LOADING, f"slot {slot} is {self.state[slot]}, not LOADING"
        self._column["version"][slot] = version
        self._set_state(slot, RETIRING)
        self.key[slot] = -1
        return version

    def to_free(self, slot: int) -> None:
        """LOADING (come from FREE) or RETIRING to FREE."""
        assert self.state[slot] in {LOADING, RETIRING}, f"slot {slot} is {self.state[slot]}"
        self._set_state(slot, FREE)
        self.key[slot] = -1
        if slot < self.n_usable:
            self._free[self.room[slot]].append(slot)
        else:
            self.raise_generation(slot)  # nobody is to look at its memory any more

    @property
    def n_closing(self) -> int:
        """Slots beyond the usable ones that are not FREE yet."""
        states = self.state[self.n_usable : self._closing_end]
        n = len(states) - states.count(FREE)
        if not n:
            self._closing_end = self.n_usable
        return n

    @property
    def closing(self) -> range:
        """Slots beyond the usable ones among which some may not be FREE."""
        return range(self.n_usable, self._closing_end)

    def use_only(self, n_usable: int) -> None:
        """From now on only the first `n_usable` slots are taken; new ones among them are FREE."""
        added = range(self.n_usable, n_usable)
        self._closing_end = max(self._closing_end, self.n_usable)
        self.n_usable = n_usable
        for room, free in enumerate(self._free):
            self._free[room] = [slot for slot in free if slot < n_usable]
        for slot in reversed(added):
            if self.state[slot] == FREE:
                self._free[self.room[slot]].append(slot)

    @property
    def free(self) -> list[int]:
        """The FREE slots among the usable ones."""
        return [slot for free in self._free for slot in free]

    def room_of(self, key: int) -> int:
        """The room of the slots that `key` may take, beside those of room 0."""
        return self._layer_room[key // self.n_experts]

    def fits(self, slot: int, room: int) -> bool:
        """Whether a slot takes experts of a room."""
        return self.room[slot] in (0, room)

    def n_free(self, room: int) -> int:
        """FREE slots for experts of a room."""
        return len(self._free[room]) + (len(self._free[0]) if room else 0)

    def take_free(self, n: int, room: int, busy: frozenset[int]) -> list[int]:
        """Up to `n` FREE slots for experts of a room, none of `busy`; to be made LOADING at once.

        Slots of the room's own come first: those of room 0 are everybody's.
        """
        taken: list[int] = []
        for free in (self._free[room], self._free[0]) if room else (self._free[0],):
            passed: list[int] = []
            while free and len(taken) < n:
                slot = free.pop()
                (passed if slot in busy else taken).append(slot)
            free.extend(reversed(passed))
        return taken

    def is_ready(self, slot: int) -> bool:
        """Whether the slot holds a key."""
        return self.state[slot] == READY

    def ready_among(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of the keys that are READY."""
        return keys[self.table.reshape(-1)[keys] >= 0]

    def note_scores(self, keys: NDArray[np.int64], scores: Any, last_uses: Any) -> None:
        """Show the scores of READY keys in their headers."""
        slots = self.table.reshape(-1)[keys]
        self._column["score"][slots] = scores
        self._column["last_use"][slots] = last_uses

    def _unname(self, slot: int) -> int:
        key = self.key[slot]
        version = self._name(key, -1)
        del self.slot_of[key]
        return version

    def _name(self, key: int, slot: int) -> int:
        self._sequence[0] |= np.uint64(1)
        self.table[divmod(key, self.n_experts)] = slot
        version = self.versions.record(key, slot)
        self._version_word[0] = version
        self._sequence[0] += np.uint64(1)
        return version

    def _write_table(self, ready: dict[int, int]) -> None:
        self._sequence[0] |= np.uint64(1)
        self.table[:] = -1
        for key, slot in ready.items():
            self.table[divmod(key, self.n_experts)] = slot
        self._version_word[0] = self.versions.current
        self._sequence[0] += np.uint64(1)

    def _set_state(self, slot: int, state: SlotState) -> None:
        self._column["state"][slot] = state
        self.state[slot] = state

    def _found_ready(self) -> list[int]:
        column = self._column
        whole = column["state"] == READY
        whole[self.n_usable :] = False
        whole &= column["layer"] < self.table.shape[0]
        whole &= column["expert"] < self.n_experts
        slots: list[int] = np.flatnonzero(whole).tolist()
        if self.n_rooms > 1:  # a wrong header must not name an expert beyond its slot's end
            layers, rooms = column["layer"], self._layer_room
            slots = [slot for slot in slots if self.fits(slot, rooms[int(layers[slot])])]
        return slots

    def _set_free(self, slots: Sequence[int]) -> None:
        """All FREE slots, ascending: the lowest is taken first."""
        self._free = [[] for _ in range(self.n_rooms)]
        for slot in reversed(slots):
            self._free[self.room[slot]].append(slot)

    def _age(self, slot: int) -> tuple[int, int]:
        return int(self._column["version"][slot]), self.generation[slot]

    def _key_in_header(self, slot: int) -> int:
        column = self._column
        return int(column["layer"][slot]) * self.n_experts + int(column["expert"][slot])
