"""The slot cache's parts wired together, on a new arena or on one that a former daemon left."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .counters import CacheCounters
from .fetches import FetchDesk
from .flights import Flights
from .leases import LeaseBook
from .placement import Placement
from .policy import Policy
from .residents import Residents
from .retirement import RetireQueue
from .slots import SlotBook, SlotRooms
from .versions import VersionLog
from .windows import WindowDesk


class Engine(Enum):
    """Who may hold a device table that names arena slots."""

    NONE = 0
    UNKNOWN = 1  # a former daemon's engine may live
    ATTACHED = 2


def _word() -> NDArray[np.uint64]:
    return np.zeros(1, np.uint64)


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """The arrays that the cache alone writes; views of the arena, or any others."""

    table: NDArray[np.int32]  # [n_layers, n_experts], C order
    headers: NDArray[Any]  # [as many slots as there may ever be] of protocol.arena.layout.HEADER
    sequence: NDArray[np.uint64] = field(default_factory=_word)  # [1], odd while the table changes
    version: NDArray[np.uint64] = field(default_factory=_word)  # [1], shows the table's version
    rooms: SlotRooms | None = None  # None: every slot takes any expert


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """Numbers from the arena's budget."""

    free_pool: int  # slots kept FREE for readers and prefetch
    lease_quota: int  # leases of all readers together, those being read included
    history: int = 8192  # keys whose last change is remembered for `changes_since`
    n_slots: int = 0  # the first slots, which may be used; 0: all
    follow_hints: bool = False  # read what an engine foresees


class CacheParts:
    """What SlotCache works with."""

    def __init__(
        self, memory: CacheMemory, policy: Policy, limits: CacheLimits, first_version: int
    ) -> None:
        """Wire the parts; `empty` and `adopt` also bring the slots into a consistent state."""
        n_experts = memory.table.shape[1]
        self.memory = memory
        self.limits = limits
        self.policy = policy
        self.engine = Engine.NONE
        self.counters = CacheCounters()
        self.residents = Residents(policy, self.counters)
        self.book = SlotBook(
            memory.table,
            memory.headers,
            versions=VersionLog(n_experts, first_version, limits.history),
            sequence=memory.sequence,
            version_word=memory.version,
            n_usable=limits.n_slots or None,
            rooms=memory.rooms,
        )
        self.retired = RetireQueue()
        self.flights = Flights(self.book, self.residents, self.retired, self.counters)
        self.windows = WindowDesk()
        self.leases = LeaseBook(limits.lease_quota)
        self.barred: dict[int, tuple[str, str]] = {}  # keys not to be read, and why: (code, text)
        self.fetches = FetchDesk(self.leases, n_experts)
        self.placement = Placement(
            self.book,
            self.residents,
            self.retired,
            self.leases,
            self.counters,
            free_pool=limits.free_pool,
        )

    @classmethod
    def empty(cls, memory: CacheMemory, policy: Policy, limits: CacheLimits) -> CacheParts:
        """Every slot FREE, every table entry -1."""
        parts = cls(memory, policy, limits, 0)
        parts.book.reset()
        return parts

    @classmethod
    def adopt(
        cls, memory: CacheMemory, policy: Policy, limits: CacheLimits, *, engine_may_live: bool
    ) -> CacheParts:
        """READY slots stay; the others are RETIRING in a new version, or FREE without an engine."""
        headers = memory.headers
        found = max(int(headers["version"].max(initial=0)), int(memory.version[0]))
        parts = cls(memory, policy, limits, found + 1)
        parts.engine = Engine.UNKNOWN if engine_may_live else Engine.NONE
        for slot in parts.book.adopt(free_others=not engine_may_live):
            parts.retired.add(slot, found + 1)
        parts._restore_scores()
        return parts

    def free_retired(self) -> None:
        """RETIRING slots that nothing can name any more are FREE."""
        gone = self.engine is Engine.NONE
        for slot in self.retired.take_all() if gone else self.retired.take_free():
            self.book.to_free(slot)

    def _restore_scores(self) -> None:
        """Give the policy what the headers say, and the headers what the policy made of it."""
        headers, slot_of = self.memory.headers, self.book.slot_of
        self.counters.n_restored = len(slot_of)
        score = np.nan_to_num(headers["score"], nan=0.0, posinf=0.0, neginf=0.0).tolist()
        last_use = headers["last_use"].tolist()
        self.policy.restore([(key, score[slot], last_use[slot]) for key, slot in slot_of.items()])
        keys = self.policy.residents()
        self.book.note_scores(keys, self.policy.scores(keys), self.policy.last_uses(keys))
