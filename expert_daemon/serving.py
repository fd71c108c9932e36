"""What an event makes possible: slots that come free, reads that begin, answers that are due.

`settle` runs after each event of the slot cache, in a fixed order: free what nobody can name, place
the window's keys, answer it, feed the readers, refill the free pool, follow advice.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from .cache_parts import CacheParts
from .foresight import Foresight
from .outcome import Load, Outcome, Purpose
from .residents import Origin
from .stream_window import StreamWindow
from .windows import Window


class Serving:
    """The working half of SlotCache."""

    def __init__(self, parts: CacheParts) -> None:
        self._parts = parts
        self._book = parts.book
        self._residents = parts.residents
        self._placement = parts.placement
        self._flights = parts.flights
        self._windows = parts.windows
        self._fetches = parts.fetches
        self._counters = parts.counters
        self.displaced: list[int] = []  # keys that a smaller arena has no place for
        self._last_step = np.full(parts.book.table.size, -1, np.int64)  # in which a key was used
        self._due = Outcome()
        self.foresight = Foresight(parts, self._begin)

    def take_due(self) -> Outcome:
        """Remove and return what fell due."""
        due, self._due = self._due, Outcome()
        due.fetches = self._fetches.take_answers()
        return due

    def new_session(self, why: str) -> None:
        """Request numbers and steps begin anew; an open window closes unanswered.

        An answer that is due but not taken goes too: its number means another request now.
        """
        self.close_early(why)
        self._due.answers.clear()
        self._windows.new_session()
        self.foresight.new_session()
        self._last_step.fill(-1)

    def count(self, step: int, keys: NDArray[np.int64], *, as_stream: bool = False) -> int:
        """Count the keys that were not counted in this step; returns how many. No key twice."""
        keys = keys[self._last_step[keys] < step]
        self._last_step[keys] = step
        self.use(keys, as_stream=as_stream)
        self._counters.n_uses += len(keys)
        return len(keys)

    def use(self, keys: NDArray[np.int64], *, as_stream: bool = False) -> None:
        """Count one use of each key."""
        residents = self._residents
        residents.use(keys, as_stream=as_stream)
        ready = self._book.ready_among(keys)
        if len(ready):
            self._book.note_scores(ready, residents.scores(ready), residents.last_uses(ready))

    def find(self, window: Window) -> None:
        """Sort a new window's keys into hits, reads to adopt and keys that need a slot."""
        counters = self._counters
        counters.n_requests += 1
        counters.n_requested += len(window.keys)
        for key in window.keys:
            load = self._flights.load_of(key)
            if key in self._book.slot_of:
                window.n_hits += 1
            elif key in self._parts.barred:
                window.faults[key] = self._parts.barred[key]
                counters.n_barred += 1
            elif load is None:
                window.unplaced.append(key)
            else:
                self._adopt_load(window, key, load)
        counters.n_hits += window.n_hits

    def close_early(self, why: str) -> None:
        """Close an open window; its keys that are not there yet fail."""
        window = self._windows.open
        if window is not None:
            self._counters.n_no_slot += window.refuse_unplaced("CANCELLED", why)
            window.refuse_reading("CANCELLED", why)
            self._windows.close(window)
            self._windows.last_keys = frozenset()

    def _adopt_load(self, window: Window, key: int, load: Load) -> None:
        window.adopt(key)
        self._counters.n_adopted += 1
        if isinstance(window, StreamWindow):
            self._residents.pass_to_stream(key)
        else:
            self._residents.ask(key)
        self._promote(load, Purpose.DEMAND)

    def fetched(self, key: int, load: Load) -> None:
        """A reader waits for a key that is being read already."""
        self._residents.ask(key)
        self._promote(load, Purpose.FETCH)

    def _promote(self, load: Load, purpose: Purpose) -> None:
        if load.purpose > purpose:
            self._due.promoted.append(replace(load, purpose=purpose))

    def _begin(self, key: int, slot: int, purpose: Purpose) -> Load:
        load = self._flights.begin(key, slot, purpose)
        self._counters.n_ahead += purpose is Purpose.AHEAD
        self._counters.n_hints += purpose is Purpose.HINT
        self._counters.n_warm += purpose is Purpose.WARM
        self._fetches.starved.pop(key, None)
        self._due.loads.append(load)
        return load

    def landed(self, key: int, fault: tuple[str, str] | None) -> None:
        """Tell all who wait for `key` that it is READY, or the (code, text) of why not."""
        if self._windows.open is not None:
            self._windows.open.landed(key, fault)
        if fault is None:
            slot = self._book.slot_of[key]
            self._fetches.landed(key, slot, self._book.generation[slot])
        else:
            self._fetches.failed(key, *fault)

    def wanted(self, load: Load) -> bool:
        """Whether the window or a reader waits for a read that may still publish."""
        key = load.layer * self._book.n_experts + load.expert
        if not self._flights.may_publish(load):
            return False
        window = self._windows.open
        return self._fetches.wants(key) or (window is not None and key in window.reading)

    def advance(self, step: int, layer: int) -> None:
        """The engine is at this layer now: what was foreseen up to it is void."""
        window = self._windows.open
        wanted = window.reading if window is not None else frozenset[int]()
        self._due.unwanted += self.foresight.passed(step, layer, wanted)

    def settle(self) -> None:
        """Do all that has become possible: free, place, answer, feed readers, refill the pool."""
        self._parts.free_retired()
        window = self._windows.open
        if isinstance(window, StreamWindow):
            self._place_stream(window)
            self._answer_part(window)
        elif window is not None:
            self._place(window)
            if window.complete:
                self._windows.close(window)
                if not window.is_answered:
                    self.answer(window, window.applied)
        self._feed_readers()
        if self._windows.open is None:
            self._settle_idle()

    def _settle_idle(self) -> None:
        """What is done outside of windows only."""
        if self._book.n_closing:
            self.displaced += self._placement.retire_closing()
            self._parts.free_retired()
        while self._placement.refill(self._fetches.starved, self._windows.last_keys):
            self._parts.free_retired()
            self._feed_readers()
        self.foresight.place()

    def _place(self, window: Window) -> None:
        """Find slots for the window's keys; what cannot get one, now or soon, fails."""
        if not window.unplaced:
            return
        self._begin_for(window, self._placement.for_window(window, len(window.unplaced)))
        if window.unplaced and not self._flights.any_but(window.key_set):
            self._refuse_unplaced(window)

    def _begin_for(self, window: Window, slots: list[int]) -> None:
        for slot in slots:
            key = window.unplaced.pop(0)
            self._begin(key, slot, Purpose.DEMAND)
            window.begin(key)
        self._counters.n_misses += len(slots)

    def _refuse_unplaced(self, window: Window) -> None:
        n_slots = self._book.n_usable
        text = f"layer {window.layer}: all {n_slots} slots are taken, leased or busy"
        self._counters.n_no_slot += window.refuse_unplaced("NO_SLOT", text)

    def _place_stream(self, window: StreamWindow) -> None:
        """Find slots for the next keys, as many as the window allows, then for those ahead."""
        if window.unplaced and window.room:
            n = min(window.room, len(window.unplaced))
            self._begin_guests(window, self._placement.for_stream(window, n, window.unplaced[0]))
        if window.lacks_next:  # nothing comes free by itself, but by reads for somebody else
            slots = self._placement.for_window(window, 1) or self._own_last(window)
            self._begin_guests(window, slots)
            if not slots and not self._flights.any_but(window.kept):
                self._refuse_unplaced(window)
        if not window.unplaced:
            self._look_ahead(window)

    def _begin_guests(self, window: StreamWindow, slots: list[int]) -> None:
        for key in window.unplaced[: len(slots)]:
            self._residents.expect(key, Origin.STREAM)
        self._begin_for(window, slots)

    def _own_last(self, window: StreamWindow) -> list[int]:
        """The slot of the stream's last expert that is there, which is to be read again then."""
        key = self._placement.last_of(window)
        if key is None:
            return []
        window.displace(key)
        self._counters.n_requested += 1
        return [self._book.slot_of[key]]

    def _look_ahead(self, window: StreamWindow) -> None:
        """Read for the next layer what the window has room for."""
        while window.ahead and window.room:
            key = window.ahead[0]
            is_there = key in self._book.slot_of or self._flights.load_of(key) is not None
            if not is_there and key not in self._parts.barred:
                slots = self._placement.for_stream(window, 1, key)
                if not slots:
                    return
                self._residents.expect(key, Origin.STREAM, foreseen=True)
                load = self._begin(key, slots[0], Purpose.AHEAD)
                self.foresight.begun_ahead(load, window.step)
                window.begun_ahead.add(key)
            window.ahead.pop(0)

    def _answer_part(self, window: StreamWindow) -> None:
        """Send what the engine may go on with; close the window after the last expert."""
        n = window.n_due(self._book.slot_of)
        if n == window.n_answered:
            return
        table = self._book.versions.since(window.sent_version)
        part = window.part(self._book.slot_of, table, n)
        self._due.answers.append(part)
        if part.final:
            self._windows.close(window)
            if window.ahead:
                ahead, limit = window.ahead, window.limit
                self.foresight.look_ahead(window.step, window.layer + 1, ahead, limit)
        elif window.lacks_next:  # all that was named has failed: nobody will consume it
            self._place_stream(window)

    def _feed_readers(self) -> None:
        """Begin the reads that readers wait for: into FREE slots, in a stream into others too."""
        starved = self._fetches.starved
        if not starved:
            return
        window = self._windows.open
        busy = frozenset[int]() if window is None else window.busy
        for key in list(starved):
            slot = self._placement.take_free(key, busy)
            if slot is None and isinstance(window, StreamWindow):  # which may stay open for long
                slot = self._placement.for_reader(window, key)
            if slot is None:
                if self._book.n_rooms == 1:
                    break
                continue  # one of another room may be FREE
            load = self._begin(key, slot, Purpose.FETCH)
            if window is not None and key in window.unplaced:
                window.unplaced.remove(key)
                self._adopt_load(window, key, load)

    def answer(self, window: Window, applied: int) -> None:
        """Make a closed window's answer due, with the changes after `applied`."""
        table = self._book.versions.since(applied)
        self._due.answers.append(window.answer(self._book.slot_of, table))
