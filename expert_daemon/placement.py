"""Which slot a key gets, and which slots are given up before anybody needs them."""

from __future__ import annotations

from collections.abc import Collection, Container
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
        room = self._book.room_of(window.keys[0])
        slots = self._book.take_free(min(n, self.n_beyond(room)), room, window.busy)
        if len(slots) < n:
            kept = _Kept(self, window.kept, window.busy, room)
            slots += self._slots_of(self._residents.victims(n - len(slots), kept))
        if len(slots) < n:
            slots += self._book.take_free(n - len(slots), room, window.busy)
        return slots

    def for_stream(self, window: StreamWindow, n: int, key: int) -> list[int]:
        """Up to `n` slots for guests: FREE ones beyond the pool, other guests', the lowest others'.

        Guests that came before this stream stay, so that the next chunk may meet them.

        key  the first of them, of whose layer the others are
        """
        room = self._book.room_of(key)
        slots = self._book.take_free(min(n, self.n_beyond(room)), room, window.busy)
        if len(slots) == n:
            return slots
        kept = _Kept(self, window.kept, window.busy, room)
        guests = self._residents.last_guests(n - len(slots), kept)
        share = self._book.n_usable // GUEST_SHARE - self._residents.n_guests - len(slots)
        n_more = min(n - len(slots) - len(guests), share)
        victims = self._residents.victims(n_more, _Either(kept, guests)) if n_more > 0 else []
        return slots + self._slots_of(guests + victims)

    def last_of(self, window: StreamWindow) -> int | None:
        """The last key of a stream that is there, not named yet and may leave for the next one."""
        room = self._book.room_of(window.unplaced[0])
        for key in reversed(window.keys[window.n_answered :]):
            is_there = key in self._book.slot_of
            if is_there and not self.keeps(key, frozenset(), window.busy, room):
                return key
        return None

    def for_reader(self, window: Window, key: int) -> int | None:
        """A READY slot that a reader's key may take while a stream is open, or None."""
        kept = _Kept(self, window.kept, window.busy, self._book.room_of(key))
        victims = self._residents.victims(1, kept)
        return self._book.slot_of[victims[0]] if victims else None

    def n_beyond(self, room: int) -> int:
        """FREE slots of a room beyond the pool, those that will be FREE soon included."""
        return max(0, self._n_free_soon(room) - self.free_pool)

    def _n_free_soon(self, room: int) -> int:
        book = self._book
        if book.n_rooms == 1:
            return book.n_free(0) + len(self._retired)
        return book.n_free(room) + sum(book.fits(slot, room) for slot in self._retired.slots())

    def _slots_of(self, keys: list[int]) -> list[int]:
        return [self._book.slot_of[key] for key in keys]

    def take_free(self, key: int, busy: frozenset[int] = frozenset()) -> int | None:
        """A FREE slot for `key`, out of the list, or None; the caller makes it LOADING."""
        slots = self._book.take_free(1, self._book.room_of(key), busy)
        return slots[0] if slots else None

    def refill(self, starved: Collection[int], spared: AbstractSet[int]) -> int:
        """Retire the lowest READY slots until the pool, and what waits for it, will be covered.

        The pool is to be had by experts of every room. Returns how many were retired.

        starved  keys that wait for a FREE slot
        spared   keys to keep: the engine was just told that they are there
        """
        book, n_retired = self._book, 0
        for room in range(book.n_rooms):
            n_starved = len(starved)
            if book.n_rooms > 1:
                n_starved = sum(book.room_of(key) == room for key in starved)
            n = self.free_pool + n_starved - self._n_free_soon(room)
            if n > 0:
                victims = self._residents.victims(n, _Kept(self, spared, frozenset(), room))
                self.retire(victims)
                n_retired += len(victims)
        return n_retired

    def lowest(self, n: int, room: int) -> list[int]:
        """The keys that would be retired next for experts of a room."""
        return self._residents.victims(n, _Kept(self, frozenset(), frozenset(), room))

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

    def keeps(self, key: int, keys: AbstractSet[int], busy: frozenset[int], room: int) -> bool:
        """Whether `key`'s slot may not be taken for experts of a room.

        It is one of `keys`, or busy, leased, about to go, or too small.
        """
        if key in keys:
            return True
        book = self._book
        slot = book.slot_of[key]
        if slot in busy or slot in self._leases.pins or slot >= book.n_usable:
            return True
        return book.n_rooms > 1 and not book.fits(slot, room)


class _Kept(Container[int]):
    """The keys that `Placement.keeps`, as a container."""

    def __init__(
        self, placement: Placement, keys: AbstractSet[int], busy: frozenset[int], room: int
    ) -> None:
        self._placement = placement
        self._keys = keys
        self._busy = busy
        self._room = room

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, int)
        return self._placement.keeps(key, self._keys, self._busy, self._room)


class _Either(Container[int]):
    """What is in one of two containers."""

    def __init__(self, one: Container[int], other: list[int]) -> None:
        self._one = one
        self._other = frozenset(other)

    def __contains__(self, key: object) -> bool:
        return key in self._other or key in self._one
