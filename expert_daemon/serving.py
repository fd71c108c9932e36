"""What an event makes possible: slots that come free, reads that begin, answers that are due.

`settle` runs after each event of the slot cache, in a fixed order: free what nobody can name, place
the window's keys, answer it, feed the readers, refill the free pool.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .cache_parts import CacheParts, Engine
from .outcome import Load, Outcome
from .windows import Window


class Serving:
    """The working half of SlotCache."""

    def __init__(self, parts: CacheParts) -> None:
        self._parts = parts
        self._book = parts.book
        self._policy = parts.policy
        self._retired = parts.retired
        self._placement = parts.placement
        self._flights = parts.flights
        self._windows = parts.windows
        self._fetches = parts.fetches
        self._counters = parts.counters
        self._last_step = np.full(parts.book.table.size, -1, np.int64)  # in which a key was used
        self._due = Outcome()

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
        self._last_step.fill(-1)

    def count(self, step: int, keys: NDArray[np.int64]) -> int:
        """Count the keys that were not counted in this step; returns how many. No key twice."""
        keys = keys[self._last_step[keys] < step]
        self._last_step[keys] = step
        self.use(keys)
        self._counters.n_uses += len(keys)
        return len(keys)

    def use(self, keys: NDArray[np.int64]) -> None:
        """Count one use of each key."""
        policy = self._policy
        policy.use(keys)
        self._book.note_scores(keys, policy.scores(keys), policy.last_uses(keys))

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

    def _adopt_load(self, window: Window, key: int, load: Load) -> None:
        window.adopt(key)
        self._counters.n_adopted += 1
        if not load.demand:
            self._due.promoted.append(load)

    def _begin(self, key: int, slot: int, *, demand: bool) -> Load:
        load = self._flights.begin(key, slot, demand=demand)
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

    def settle(self) -> None:
        """Do all that has become possible: free, place, answer, feed readers, refill the pool."""
        self._free_retired()
        window = self._windows.open
        if window is not None:
            self._place(window)
            if window.complete:
                self._windows.close(window)
                self.answer(window, window.applied)
        self._feed_readers()
        while self._windows.open is None and self._placement.refill(
            len(self._fetches.starved), self._windows.last_keys
        ):
            self._free_retired()
            self._feed_readers()

    def _free_retired(self) -> None:
        retired = self._retired
        gone = self._parts.engine is Engine.NONE
        for slot in retired.take_all() if gone else retired.take_free():
            self._book.to_free(slot)

    def _place(self, window: Window) -> None:
        """Find slots for the window's keys; what cannot get one, now or soon, fails."""
        if not window.unplaced:
            return
        slots = self._placement.for_window(window, len(window.unplaced))
        for slot in slots:
            key = window.unplaced.pop(0)
            self._begin(key, slot, demand=True)
            window.begin(key)
        self._counters.n_misses += len(slots)
        if window.unplaced and not self._flights.any_but(window.key_set):
            text = f"layer {window.layer}: all {len(self._book)} slots are taken, leased or busy"
            self._counters.n_no_slot += window.refuse_unplaced("NO_SLOT", text)

    def _feed_readers(self) -> None:
        """Begin the reads that readers wait for, as far as there are FREE slots."""
        starved = self._fetches.starved
        if not starved:
            return
        window = self._windows.open
        busy = frozenset[int]() if window is None else window.busy
        for slot in self._placement.take_free(len(starved), busy):
            key = next(iter(starved))
            load = self._begin(key, slot, demand=False)
            if window is not None and key in window.unplaced:
                window.unplaced.remove(key)
                self._adopt_load(window, key, load)

    def answer(self, window: Window, applied: int) -> None:
        """Make a closed window's answer due, with the changes after `applied`."""
        table = self._book.versions.since(applied)
        self._due.answers.append(window.answer(self._book.slot_of, table))
