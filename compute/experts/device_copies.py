"""Copies from the arena into the device cache, on a CUDA stream of their own.

Invariants: a copy is chosen first and begun at a later launch boundary, when its victim's entry has
left the device's table on the stream that launches; that stream waits for the copy's event before
the key counts as cached; a copy whose key moved meanwhile is dropped. One thread uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from protocol.arena.layout import ArenaView

from .arena_view import slots_tensor
from .device_cache import DeviceCache, Keys, Promotion
from .tiers import ExpertTiers


@dataclass(frozen=True, slots=True)
class _Copy:
    """A promotion on its way."""

    promotion: Promotion
    source: int  # arena slot
    done: torch.cuda.Event | None


def _has_ended(copy: _Copy) -> bool:
    return copy.done is None or bool(copy.done.query())  # type: ignore[no-untyped-call]


def _await(copy: _Copy) -> None:
    if copy.done is not None:
        copy.done.synchronize()


class DeviceCopies:
    """`moved` are the keys that came into or left the device cache since the caller cleared it.

    cache        whose promotions are carried out
    places       with the device cache's memory
    slot_of      the arena slot of a key, -1 for none
    is_readable  whether the device may read a key in the arena
    most         copies chosen or under way at a time
    most_filling the same where slots of the cache are free: nobody has to leave for them
    """

    def __init__(
        self,
        cache: DeviceCache,
        places: ExpertTiers,
        slot_of: Callable[[int], int],
        is_readable: Callable[[int], bool],
        most: int,
        most_filling: int,
    ) -> None:
        self.moved: set[tuple[int, int]] = set()
        self._cache = cache
        self._places = places
        self._slot_of = slot_of
        self._is_readable = is_readable
        self._most, self._most_filling = most, most_filling
        self._chosen: list[Promotion] = []  # to begin at the next launch boundary
        self._under_way: list[_Copy] = []
        self._arena: ArenaView | None = None
        self._slots: Tensor | None = None
        self._stream = None
        if places.device.type == "cuda":
            self._stream = torch.cuda.Stream(places.device)  # type: ignore[no-untyped-call]

    def attach(self, arena: ArenaView) -> None:
        """Copy from this arena from now on; nothing is chosen or under way."""
        self._arena, self._slots = arena, slots_tensor(arena)

    def choose(self, keys: Keys) -> None:
        """Choose which of a step's keys move to the device; victims are out from now on."""
        self.take_ended()
        absent = keys[self._cache.slot_of[keys] < 0].tolist()
        promotable = np.array([key for key in absent if self._is_readable(key)], np.int64)
        for promotion in self._cache.begin(promotable, self._room()):
            self._chosen.append(promotion)
            if promotion.victim >= 0:
                self._note(promotion.victim)

    def _room(self) -> int:
        n_begun = len(self._under_way) + len(self._chosen)
        return max(self._most - n_begun, min(self._cache.n_free, self._most_filling - n_begun))

    @property
    def has_chosen(self) -> bool:
        """Whether there are copies to begin."""
        return bool(self._chosen)

    def begin_chosen(self) -> None:
        """At a launch boundary, the victims' entries having left the table: begin the copies."""
        chosen, self._chosen = self._chosen, []
        for promotion in chosen:
            self._begin(promotion)

    def sources(self, *, chosen: bool = False) -> list[int]:
        """Return the arena slots that unfinished copies read, ascending; and chosen ones will.

        Those that have ended are taken first: their slots may be given to other keys at once.
        """
        self.take_ended()
        slots = {copy.source for copy in self._under_way}
        if chosen:
            # One that the device may not read yet as well: it may by the time that copies begin.
            slots.update(self._slot_of(each.key) for each in self._chosen)
        return sorted(slots - {-1})

    def take_ended(self) -> None:
        """Let the keys count whose copies have ended: they end in the order in which they began."""
        while self._under_way and _has_ended(self._under_way[0]):
            self._finish(self._under_way.pop(0))

    def finish(self) -> None:
        """Wait for the copies under way, and let their keys count."""
        for copy in self._under_way:
            _await(copy)
            self._finish(copy)
        self._under_way.clear()

    def drop_moved(self) -> None:
        """Wait for the copies whose key has left its slot, and drop them: the rest goes on."""
        for copy in [copy for copy in self._under_way if self._has_moved(copy)]:
            _await(copy)
            self._under_way.remove(copy)
            self._finish(copy)

    def abandon(self) -> None:
        """Drop what is chosen, and what is under way once it has ended."""
        for copy in self._under_way:
            _await(copy)
            self._cache.abandon(copy.promotion)
        self._under_way.clear()
        for promotion in self._chosen:
            self._cache.abandon(promotion)
        self._chosen.clear()

    def _begin(self, promotion: Promotion) -> None:
        """Begin a copy; the victim's entry has left the table before, on the launching stream."""
        if not self._is_readable(promotion.key):  # retired since it was chosen
            self._cache.abandon(promotion)
            return
        assert self._arena is not None
        assert self._slots is not None
        source, rooms = self._slot_of(promotion.key), self._arena.layout.rooms
        start, size = rooms.end(source), rooms.size(source)
        target = self._places.cache[promotion.slot, :size]
        done = None
        if self._stream is None:
            target.copy_(self._slots[start : start + size])
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                target.copy_(self._slots[start : start + size], non_blocking=True)
                done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                done.record()
        self._under_way.append(_Copy(promotion, source, done))

    def _finish(self, copy: _Copy) -> None:
        """Enter a copy that has ended, unless its key moved meanwhile."""
        if self._has_moved(copy):
            self._cache.abandon(copy.promotion)
            return
        if copy.done is not None:
            torch.cuda.current_stream().wait_event(copy.done)
        self._cache.finish(copy.promotion)
        self._note(copy.promotion.key)

    def _has_moved(self, copy: _Copy) -> bool:
        return self._slot_of(copy.promotion.key) != copy.source

    def _note(self, key: int) -> None:
        self.moved.add(divmod(key, self._places.n_experts))
