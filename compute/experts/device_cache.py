"""Which experts the device itself holds, chosen by least frequent use with dynamic aging.

Pure: no device, no I/O, no clock. A key that only the arena holds is promoted when its score beats
the lowest of the residents by a margin, a few keys a step; a cache that is not full takes what
comes. A promotion has two halves, since a copy takes time: `begin` names slots and takes victims
out, `finish` or `abandon` ends each. Invariants: a slot holds one key at most; a key is in one slot
at most; a slot in a promotion is nobody's. Source: DESIGN.md, sections 2 and 8.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Keys = NDArray[np.int64]

MARGIN = 1.0  # by which a score must beat the victim's: one use
_MOST_USES = 16.0
ABSENT, ON_DEVICE, UPPER_HALF = 0, 1, 2  # the bytes that the daemon reads


@dataclass(frozen=True, slots=True)
class Promotion:
    """A key on its way into a slot, and the key that left it, -1 for none."""

    key: int
    slot: int
    victim: int


class DeviceCache:
    """`slot_of[key]` is the device slot of a key, -1 where it has none."""

    def __init__(self, n_keys: int, n_slots: int, *, margin: float = MARGIN) -> None:
        self.n_slots = n_slots
        self.slot_of = np.full(n_keys, -1, np.int64)
        self.key_in = np.full(n_slots, -1, np.int64)
        self.n_promoted = 0
        self._free = list(range(n_slots - 1, -1, -1))
        self._uses = np.zeros(n_keys)
        self._scores = np.zeros(n_keys)
        self._last_use = np.zeros(n_keys, np.int64)
        self._age = 0.0
        self._clock = 0
        self._margin = margin
        self._moving: set[int] = set()  # keys

    @property
    def resident(self) -> Keys:
        """Keys on the device, in the order of their slots."""
        return self.key_in[self.key_in >= 0]

    @property
    def n_free(self) -> int:
        """Slots that nobody has."""
        return len(self._free)

    def use(self, keys: Keys) -> None:
        """Count one use of each of a step's keys, wherever they were found."""
        self._clock += 1
        self._uses[keys] = np.minimum(_MOST_USES, self._uses[keys] + 1)
        self._scores[keys] = self._age + self._uses[keys]
        self._last_use[keys] = self._clock

    def begin(self, promotable: Keys, most: int) -> list[Promotion]:
        """Choose up to `most` of the keys and their slots; victims are out from now on."""
        absent = [
            int(key) for key in promotable
            if self.slot_of[key] < 0 and int(key) not in self._moving
        ]  # fmt: skip
        best = sorted(absent, key=lambda key: (-self._scores[key], key))
        chosen: list[Promotion] = []
        for key in best[:most]:
            slot, victim = self._room_for(key)
            if slot < 0:
                break
            self._moving.add(key)
            chosen.append(Promotion(key, slot, victim))
        return chosen

    def finish(self, promotion: Promotion) -> None:
        """The key's bytes are in its slot."""
        self._moving.discard(promotion.key)
        self.slot_of[promotion.key] = promotion.slot
        self.key_in[promotion.slot] = promotion.key
        self.n_promoted += 1

    def abandon(self, promotion: Promotion) -> None:
        """The key did not arrive: its slot is free."""
        self._moving.discard(promotion.key)
        self._free.append(promotion.slot)

    def drop(self, key: int) -> None:
        """Take a key out that is in a slot; the slot is free."""
        slot = int(self.slot_of[key])
        self.slot_of[key], self.key_in[slot] = -1, -1
        self._free.append(slot)

    def tier_bytes(self) -> NDArray[np.uint8]:
        """Return the advice to the arena, a byte a key: UPPER_HALF for the best half."""
        tier = np.full(len(self.slot_of), ABSENT, np.uint8)
        resident = self.resident
        tier[resident] = ON_DEVICE
        n_lower = (len(resident) + 1) // 2
        if n_lower < len(resident):
            ranks = self._scores[resident] + 1e-9 * self._last_use[resident]
            tier[resident[np.argpartition(ranks, n_lower)[n_lower:]]] = UPPER_HALF
        return tier

    def _room_for(self, key: int) -> tuple[int, int]:
        """Return (slot, the key that leaves it or -1); (-1, -1) where none is worth less."""
        if self._free:
            return self._free.pop(), -1
        slots = np.flatnonzero(self.key_in >= 0)
        if not len(slots):
            return -1, -1
        keys = self.key_in[slots]
        scores = self._scores[keys]
        tied = np.flatnonzero(scores == scores.min())  # sorting all of them takes too long
        lowest = tied[np.lexsort((keys[tied], self._last_use[keys[tied]]))[0]]
        slot, victim = int(slots[lowest]), int(keys[lowest])
        if self._scores[key] < self._scores[victim] + self._margin:
            return -1, -1
        self._age = float(self._scores[victim])
        self._uses[victim] *= 0.5
        self.slot_of[victim], self.key_in[slot] = -1, -1
        return slot, victim


def keys_of(layers: ArrayLike, experts: ArrayLike, n_experts: int) -> Keys:
    """Return flat key numbers."""
    return np.asarray(layers, np.int64) * n_experts + np.asarray(experts, np.int64)
