"""Which slot a key gets, and which slots are given up before anybody needs them."""

from __future__ import annotations

from collections.abc import Container

from .counters import CacheCounters
from .leases import LeaseBook
from .policy import Policy
from .retirement import RetireQueue
from .slots import SlotBook
from .windows import Window


class Placement:
    """Takes slots: FREE ones for everybody, READY ones for a write window."""

    def __init__(
        self,
        book: SlotBook,
        policy: Policy,
        retired: RetireQueue,
        leases: LeaseBook,
        counters: CacheCounters,
        *,
        free_pool: int,
    ) -> None:
        self.free_pool = free_pool
        self._book = book
        self._policy = policy
        self._retired = retired
        self._leases = leases
        self._counters = counters

    def for_window(self, window: Window, n: int) -> list[int]:
        """Up to `n` slots: FREE ones beyond the pool, then victims, then the pool's."""
        beyond = len(self._book.free) + len(self._retired) - self.free_pool
        slots = self.take_free(min(n, max(beyond, 0)), window.busy)
        if len(slots) < n:
            victims = self._policy.victims(n - len(slots), _Kept(self, window.key_set, window.busy))
            slots += [self._book.slot_of[key] for key in victims]
        if len(slots) < n:
            slots += self.take_free(n - len(slots), window.busy)
        return slots

    def take_free(self, n: int, busy: frozenset[int]) -> list[int]:
        """Up to `n` FREE slots, out of the list; the caller makes them LOADING."""
        free = self._book.free
        taken: list[int] = []
        passed: list[int] = []
        while free and len(taken) < n:
            slot = free.pop()
            (passed if slot in busy else taken).append(slot)
        free.extend(reversed(passed))
        return taken

    def refill(self, n_starved: int, spared: frozenset[int]) -> int:
        """Retire the lowest READY slots until the pool, and what waits for it, will be covered.

        spared  keys to keep: the engine was just told that they are there
        """
        n = self.free_pool + n_starved - len(self._book.free) - len(self._retired)
        if n <= 0:
            return 0
        victims = self._policy.victims(n, _Kept(self, spared, frozenset()))
        for key in victims:
            slot = self._book.slot_of[key]
            self._policy.evict(key)
            self._retired.add(slot, self._book.to_retiring(slot))
        self._counters.n_retirements += len(victims)
        return len(victims)

    def keeps(self, key: int, keys: frozenset[int], busy: frozenset[int]) -> bool:
        """Whether `key`'s slot may not be taken: one of `keys`, or busy, or leased."""
        if key in keys:
            return True
        slot = self._book.slot_of[key]
        return slot in busy or slot in self._leases.pins


class _Kept(Container[int]):
    """The keys that `Placement.keeps`, as a container."""

    def __init__(self, placement: Placement, keys: frozenset[int], busy: frozenset[int]) -> None:
        self._placement = placement
        self._keys = keys
        self._busy = busy

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, int)
        return self._placement.keeps(key, self._keys, self._busy)
