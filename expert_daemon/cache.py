"""The slot cache: which key sits in which arena slot, and who may change that when.

It owns the slot table and the slot headers (numpy arrays given by the caller, usually views of
the arena). It is pure: no read, no clock, no thread, no socket. One thread calls it.

Use: call one event method (`open_window`, `finish`, `fail`, `fetch`, `ack` ...), then `drain`:
start the loads, send the answers. Then push `changes_since(what the engine was sent last)`
where `window_open` is false and `table_version` has grown.

Invariants (`check` verifies them):
* a slot is in exactly one state and its only edges are FREE-LOADING, READY-LOADING (in a
  write window), READY-RETIRING, LOADING-READY, LOADING-RETIRING, LOADING-FREE, RETIRING-FREE;
* LOADING stands in the header before the first byte, READY after the last byte and checksum;
  on eviction the table entry goes to -1 before anything else;
* a key is READY or LOADING (and not disowned) in at most one slot, in two while a read is hedged;
* no slot of the open window's experts, none of its busy ones, none leased, none LOADING is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .cache_check import check_parts
from .cache_parts import CacheLimits, CacheMemory, CacheParts, Engine
from .engine_events import EngineEvents
from .outcome import Load, Outcome, SlotChange, TableChanges
from .policy import Policy


class SlotCache(EngineEvents):
    """The state machine of DESIGN.md section 2. Make one with `empty` or `adopt`."""

    def __init__(self, parts: CacheParts) -> None:
        """Take parts whose slots are in a consistent state."""
        super().__init__(parts)
        self._flights = parts.flights
        self._fetches = parts.fetches

    @classmethod
    def empty(cls, memory: CacheMemory, policy: Policy, limits: CacheLimits) -> SlotCache:
        """Start on a new arena: every slot FREE, every table entry -1, version 0, no engine."""
        return cls(CacheParts.empty(memory, policy, limits))

    @classmethod
    def adopt(
        cls,
        memory: CacheMemory,
        policy: Policy,
        limits: CacheLimits,
        *,
        engine_may_live: bool = True,
    ) -> SlotCache:
        """Take over what a former daemon left: READY slots stay READY with their scores.

        Every other slot is RETIRING until an engine attached and acknowledged, or `engine_gone`.
        The table is rebuilt from the READY headers; of two with one key the newer version stays,
        then the newer generation. Versions go on above every version found.
        `engine_may_live=False` (nobody is attached to the arena) frees the others at once.
        """
        return cls(CacheParts.adopt(memory, policy, limits, engine_may_live=engine_may_live))

    @property
    def n_slots(self) -> int:
        """Slots that may be used, in whatever state."""
        return self._book.n_usable

    @property
    def policy(self) -> Policy:
        """Which key leaves first; only to look at."""
        return self._parts.policy

    @property
    def n_experts(self) -> int:
        """Experts of a layer."""
        return self._book.n_experts

    @property
    def has_engine(self) -> bool:
        """Whether there may be an engine that reads the arena."""
        return self._parts.engine is not Engine.NONE

    @property
    def n_closing(self) -> int:
        """Slots beyond those that may be used which are not FREE yet."""
        return self._book.n_closing

    @property
    def n_warm_left(self) -> int:
        """Keys of the last `warm` that are still to be looked at."""
        return self._serving.foresight.n_warm_left

    @property
    def is_cut_short(self) -> bool:
        """Whether there are keys to be warm that `go_on` would look at now."""
        return self._serving.foresight.is_cut_short and not self.window_open

    @property
    def hints_ended(self) -> bool:
        """Whether hints were of too little use to this engine to be followed further."""
        return self._serving.foresight.hints_ended

    @property
    def table_version(self) -> int:
        """Raised by one with every change of the table."""
        return self._book.versions.current

    @property
    def window_open(self) -> bool:
        """Whether a MissRequest is unanswered."""
        return self._windows.open is not None

    @property
    def n_loading(self) -> int:
        """Slots with a read outstanding."""
        return len(self._flights)

    # size

    def resize(self, n_slots: int, *, free_pool: int, lease_quota: int) -> None:
        """Use the first `n_slots` slots only, or slots that were not used before as well.

        Of slots given up the keys are retired outside of windows; once `n_closing` is 0 they are
        FREE and stay so. Slots added must be readable by the engine already.
        """
        self._parts.placement.free_pool = free_pool
        self._parts.leases.set_quota(lease_quota)
        self._book.use_only(n_slots)
        self._serving.settle()

    def take_displaced(self) -> list[tuple[int, int]]:
        """(layer, expert) keys that a smaller arena has lost, the one worth most first."""
        lost, self._serving.displaced = self._serving.displaced, []
        lost.sort(key=self._parts.policy.figures, reverse=True)
        return [divmod(key, self._book.n_experts) for key in lost]

    # reads

    def finish(self, load: Load, checksum: int = 0) -> bool:
        """The read returned whole: publish the key. False where it was disowned meanwhile."""
        key = self._flights.land(load, checksum)
        if key is not None:
            self._serving.landed(key, None)
        self._serving.settle()
        return key is not None

    def fail(self, load: Load, code: str, text: str) -> None:
        """The read returned without the bytes: FREE where the slot came from FREE, else RETIRING.

        Whoever waits for the key gets `code` (of ERROR_CODES) and `text`, unless it is hedged.
        """
        key = self._flights.land(load, None)
        if key is not None:
            self._serving.landed(key, (code, text))
        self._serving.settle()

    def hedge(self, load: Load) -> Load | None:
        """Read the key of a slow read into a FREE slot as well; the first that is whole publishes.

        None where no slot is FREE, the read can publish no more, or it has a second one already.
        """
        if not self._flights.may_hedge(load):
            return None
        window = self._windows.open
        key = load.layer * self._book.n_experts + load.expert
        slot = self._parts.placement.take_free(key, window.busy if window else frozenset())
        if slot is None:
            return None
        twin = self._flights.hedge(load, slot)
        self._serving.settle()
        return twin

    def disown(self, load: Load, code: str, text: str) -> None:
        """Wait for this read no longer: unless it is hedged, its key fails and may be read anew.

        The slot stays LOADING until `finish` or `fail`, and nothing is published then.
        """
        key = self._flights.disown(load)
        if key is not None:
            self._serving.landed(key, (code, text))
        self._serving.settle()

    def give_up(self, layer: int, expert: int, slot: int, generation: int) -> bool:
        """Take a READY key out of the table because its bytes are bad.

        False where a window or a lease keeps it now: try again. True also where the slot has
        another generation by now, and with it other bytes.
        """
        key = layer * self._book.n_experts + expert
        if self._book.slot_of.get(key) != slot or self._book.generation[slot] != generation:
            return True
        if self.window_open or not self._parts.placement.give_up(key):
            return False
        self._serving.settle()
        return True

    def bar(self, layer: int, expert: int, code: str, text: str) -> None:
        """Read this key no more: who asks for it while it is absent gets `code` and `text`."""
        self._parts.barred[layer * self._book.n_experts + expert] = (code, text)

    def unbar(self, layer: int, expert: int) -> None:
        """The key may be read again."""
        self._parts.barred.pop(layer * self._book.n_experts + expert, None)

    def objection(self, load: Load) -> tuple[str, str] | None:
        """(code, text) where a load that fell due is of a key that is not to be read."""
        return self._parts.barred.get(load.layer * self._book.n_experts + load.expert)

    def may_publish(self, load: Load) -> bool:
        """Whether a read under way was not disowned."""
        return self._flights.may_publish(load)

    def wanted(self, load: Load) -> bool:
        """Whether anybody waits for this read; if not, one not yet begun may be given to `fail`."""
        return self._serving.wanted(load)

    # readers

    def fetch(self, client: int, request: int, keys: Sequence[tuple[int, int]]) -> None:
        """Lease `keys` to a reader; the FetchAnswer comes out of `drain` when all are there.

        Absent keys are read into FREE slots, and into others while a stream is open; without one
        they wait. Over the quota: busy.
        Raises RequestRefused where the number is that of a fetch still waiting.
        """
        flat = tuple(layer * self._book.n_experts + expert for layer, expert in keys)
        if not self._fetches.begin(client, request, flat):
            return
        self._serving.use(np.array(sorted(flat), np.int64))
        for key in flat:
            slot = self._book.slot_of.get(key)
            if slot is not None:
                self._fetches.landed(key, slot, self._book.generation[slot])
                self.counters.n_fetch_hits += 1
                continue
            self.counters.n_fetch_misses += 1
            load = self._flights.load_of(key)
            if key in self._parts.barred:
                self._fetches.failed(key, *self._parts.barred[key])
            elif load is None:
                self._fetches.starved[key] = None
            else:
                self._serving.fetched(key, load)
        self._serving.settle()

    def end_fetch(self, client: int, request: int, code: str = "TIMEOUT") -> None:
        """Answer a waiting fetch with what is there; the rest fails (NO_SLOT or `code`)."""
        self._fetches.end(client, request, code)

    def release(self, client: int, leases: Sequence[tuple[int, int]]) -> int:
        """Give (slot, generation) leases back; returns how many were held."""
        n = sum(self._fetches.leases.drop(client, *lease) for lease in leases)
        self._serving.settle()
        return n

    def client_gone(self, client: int) -> None:
        """Drop the reader's leases and waiting fetches."""
        self._fetches.client_gone(client)
        self._serving.settle()

    # what falls due

    def go_on(self) -> None:
        """Look at further keys to be warm, where nothing else happens."""
        self._serving.settle()

    def drain(self) -> Outcome:
        """Loads to start and answers to send since the last call. Cheap when nothing happened."""
        return self._serving.take_due()

    def changes_since(self, from_version: int) -> TableChanges:
        """The final state of each key changed after `from_version`; see TableChanges for a gap."""
        return self._book.versions.since(from_version)

    @property
    def n_resident(self) -> int:
        """READY keys."""
        return len(self._book.slot_of)

    def resident_keys(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Flat keys and slots of every READY key, ascending: as `resident`, at a small cost."""
        slots = self._book.table.reshape(-1)
        keys = np.flatnonzero(slots >= 0)
        return keys, slots[keys]

    def resident(self) -> list[SlotChange]:
        """(layer, expert, slot) of every READY key, ascending."""
        n_experts = self._book.n_experts
        return [(*divmod(key, n_experts), s) for key, s in sorted(self._book.slot_of.items())]

    @property
    def engine_applied(self) -> int:
        """The highest table version that the engine acknowledged, -1 = none."""
        return self._parts.retired.applied

    def check(self) -> None:
        """Raise AssertionError where an invariant does not hold. O(n_slots); for tests."""
        check_parts(self._parts)
