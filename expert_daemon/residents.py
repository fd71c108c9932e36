"""Who leaves first: guests in the order of their coming, then the policy's residents.

A guest is a READY key that nobody has asked for by itself: a chunk of a prompt streamed through, or
a hint foresaw it. It stands below every resident of the policy, which does not know it; its first
use makes it a resident. `expect` says of a key that is being read that it will come as a guest.
One that is foreseen for a moment still to come leaves last of all, until `fade`.

Pure. To its users it looks like a policy.
"""

from __future__ import annotations

from collections.abc import Container
from enum import Enum
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from .counters import CacheCounters
from .policy import Policy
from .ranking import Keys


class Origin(Enum):
    """What brought a guest."""

    STREAM = 0
    HINT = 1


class Residents:
    """The READY keys, guests and others."""

    def __init__(self, policy: Policy, counters: CacheCounters) -> None:
        self.name = policy.name
        self._policy = policy
        self._counters = counters
        self._guests: dict[int, Origin] = {}  # READY, the first to come first
        self._expected: dict[int, Origin] = {}  # being read
        self._foreseen: set[int] = set()  # of both, those whose moment is to come

    @property
    def n_guests(self) -> int:
        """Guests, those being read included."""
        return len(self._guests) + len(self._expected)

    @property
    def guests(self) -> frozenset[int]:
        """The READY ones."""
        return frozenset(self._guests)

    @property
    def expected(self) -> frozenset[int]:
        """Those being read."""
        return frozenset(self._expected)

    def expect(self, key: int, origin: Origin, *, foreseen: bool = False) -> None:
        """`key` is being read for nobody in particular."""
        self._expected[key] = origin
        if foreseen:
            self._foreseen.add(key)

    def fade(self, key: int) -> None:
        """The moment for which `key` was foreseen has passed."""
        self._foreseen.discard(key)

    def ask(self, key: int) -> None:
        """Somebody waits for `key`, which is being read: it will be no guest."""
        if self._expected.pop(key, None) is Origin.HINT:
            self._counters.n_hints_useful += 1

    def pass_to_stream(self, key: int) -> None:
        """A stream waits for `key`, which is being read: if it was to be a guest it still will."""
        if key in self._expected:
            self.ask(key)
            self._expected[key] = Origin.STREAM

    def miss(self, key: int) -> None:
        """The read of `key` ended without it."""
        self._expected.pop(key, None)

    def use(self, keys: Keys, *, as_stream: bool = False) -> None:
        """Count one use of each key; a guest is none any more, unless a stream uses it."""
        self._policy.use(keys)
        if not self._guests or as_stream:
            return
        for key in keys.tolist():
            origin = self._guests.pop(key, None)
            if origin is not None:
                self._counters.n_hints_useful += origin is Origin.HINT
                self._policy.admit(key)

    def admit(self, key: int) -> None:
        """`key` is READY."""
        origin = self._expected.pop(key, None)
        if origin is None:
            self._policy.admit(key)
        else:
            self._guests[key] = origin

    def evict(self, key: int) -> None:
        """`key` was chosen as a victim."""
        origin = self._guests.pop(key, None)
        if origin is None:
            self._policy.evict(key)
        else:
            self._counters.n_hints_wasted += origin is Origin.HINT

    def drop(self, key: int) -> None:
        """`key` leaves for another reason."""
        if self._guests.pop(key, None) is None:
            self._policy.drop(key)

    def victims(self, n: int, excluded: Container[int]) -> list[int]:
        """Up to `n` keys to give up: guests, the first come first, then what the policy says."""
        foreseen = self._foreseen
        guests = (key for key in self._guests if key not in foreseen and key not in excluded)
        chosen = list(islice(guests, n))
        if len(chosen) < n:
            chosen += self._policy.victims(n - len(chosen), excluded)
        if len(chosen) < n and foreseen:
            rest = (key for key in self._guests if key in foreseen and key not in excluded)
            chosen += islice(rest, n - len(chosen))
        return chosen

    def last_guests(self, n: int, excluded: Container[int]) -> list[int]:
        """Up to `n` guests to give up, the last come first, so that earlier ones are met again."""
        foreseen = self._foreseen
        guests = (key for key in reversed(self._guests) if key not in foreseen)
        return list(islice((key for key in guests if key not in excluded), n))

    def scores(self, keys: Keys) -> NDArray[np.float64]:
        """What the slot headers show."""
        scores = self._policy.scores(keys)
        for place, key in enumerate(keys.tolist() if self._guests else ()):
            if key in self._guests:
                scores[place] = self.figures(key)[0]
        return scores

    def last_uses(self, keys: Keys) -> Keys:
        """Ticks of the last uses, 0 = never."""
        return self._policy.last_uses(keys)

    def figures(self, key: int) -> tuple[float, int]:
        """(score, last use) of one key; a guest's is the lowest of all."""
        if key not in self._guests:
            return self._policy.figures(key)
        lowest = self._policy.victims(1, ())
        return (self._policy.figures(lowest[0])[0] if lowest else 0.0), 0

    def residents(self) -> Keys:
        """The READY keys, ascending."""
        guests = np.fromiter(self._guests, np.int64, len(self._guests))
        return np.sort(np.concatenate((self._policy.residents(), guests)))

    def restore(self, residents: list[tuple[int, float, int]]) -> None:
        """Take (key, score, last_use) of a former daemon's READY keys; once, when empty."""
        self._policy.restore(residents)
