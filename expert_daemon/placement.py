"""Which slot a key gets, and which slots are given up before anybody needs them."""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Set as AbstractSet

from .counters import CacheCounters
from .leases import LeaseBook
from .residents import Residents
from .retirement import RetireQueue
from .slots import SlotBook
from .stream_window import StreamWindow
from .windows import Window

GUEST_SHARE = 4  # guests take at most a quarter of the slots from residents


class Placement:
    """Takes slots: FREE ones for everybody, READY ones for a write window."""

    def __init__(
        self,
        book: SlotBook,
        residents: Residents,
        retired: RetireQueue,
        leases: LeaseBook,
        counters: CacheCounters,
        *,
        free_pool: int,
    ) -> None:
        self.free_pool = free_pool
        self._book = book
        self._residents = residents
        self._retired = retired
        self._leases = leases
        self._counters = counters

    def for_window(self, window: Window, n: int) -> list[int]:
        """Up to `n` slots: FREE ones beyond the pool, then victims, then the pool's."""
        slots = self.take_free(min(n, self.n_beyond), window.busy)
        if len(slots) < n:
            kept = _Kept(self, window.kept, window.busy)
            slots += self._slots_of(self._residents.victims(n - len(slots), kept))
        if len(slots) < n:
            slots += self.take_free(n - len(slots), window.busy)
        return slots

    def for_stream(self, window: StreamWindow, n: int) -> list[int]:
        """Up to `n` slots for guests: FREE ones beyond the pool, other guests', the lowest others'.

        Guests that came before this stream stay, so that the next chunk may meet them.
        """
        slots = self.take_free(min(n, self.n_beyond), window.busy)
        if len(slots) == n:
            return slots
        kept = _Kept(self, window.kept, window.busy)
        guests = self._residents.last_guests(n - len(slots), kept)
        share = self._book.n_usable // GUEST_SHARE - self._residents.n_guests - len(slots)
        n_more = min(n - len(slots) - len(guests), share)
        victims = self._residents.victims(n_more, _Either(kept, guests)) if n_more > 0 else []
        return slots + self._slots_of(guests + victims)

    @property
    def n_beyond(self) -> int:
        """FREE slots beyond the pool, those that will be FREE soon included."""
        return max(0, len(self._book.free) + len(self._retired) - self.free_pool)

    def _slots_of(self, keys: list[int]) -> list[int]:
        return [self._book.slot_of[key] for key in keys]

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

    def refill(self, n_starved: int, spared: AbstractSet[int]) -> int:
        """Retire the lowest READY slots until the pool, and what waits for it, will be covered.

        spared  keys to keep: the engine was just told that they are there
        """
        n = self.free_pool + n_starved - len(self._book.free) - len(self._retired)
        if n <= 0:
            return 0
        victims = self._residents.victims(n, _Kept(self, spared, frozenset()))
        self.retire(victims)
        return len(victims)

    def lowest(self, n: int) -> list[int]:
        """The keys that would be retired next."""
        return self._residents.victims(n, _Kept(self, frozenset(), frozenset()))

    def retire(self, keys: list[int]) -> None:
        """READY keys leave the table; their slots are FREE once no device can name them."""
        for key in keys:
            slot = self._book.slot_of[key]
            self._residents.evict(key)
            self._retired.add(slot, self._book.to_retiring(slot))
        self._counters.n_retirements += len(keys)

    def give_up(self, key: int) -> bool:
        """Retire a READY key whose bytes are bad; False while it is leased."""
        slot = self._book.slot_of[key]
        if slot in self._leases.pins:
            return False
        self._residents.drop(key)
        self._retired.add(slot, self._book.to_retiring(slot))
        self._counters.n_retirements += 1
        return True

    def retire_closing(self) -> list[int]:
        """Retire READY slots beyond those that may be used, unless leased; return their keys."""
        book = self._book
        pins = self._leases.pins
        ready = [slot for slot in book.closing if book.is_ready(slot) and slot not in pins]
        keys = [book.key[slot] for slot in ready]
        for key, slot in zip(keys, ready, strict=True):
            self._residents.drop(key)
            self._retired.add(slot, book.to_retiring(slot))
        self._counters.n_retirements += len(keys)
        return keys

    def keeps(self, key: int, keys: AbstractSet[int], busy: frozenset[int]) -> bool:
        """Whether `key`'s slot may not be taken: one of `keys`, or busy, leased, about to go."""
        if key in keys:
            return True
        slot = self._book.slot_of[key]
        return slot in busy or slot in self._leases.pins or slot >= self._book.n_usable


class _Kept(Container[int]):
    """The keys that `Placement.keeps`, as a container."""

    def __init__(self, placement: Placement, keys: AbstractSet[int], busy: frozenset[int]) -> None:
        self._placement = placement
        self._keys = keys
        self._busy = busy

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, int)
        return self._placement.keeps(key, self._keys, self._busy)


class _Either(Container[int]):
    """What is in one of two containers."""

    def __init__(self, one: Container[int], other: list[int]) -> None:
        self._one = one
        self._other = frozenset(other)

    def __contains__(self, key: object) -> bool:
        return key in self._other or key in self._one
