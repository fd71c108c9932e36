"""Slots that may have been written to by somebody else, and what becomes of them.

Runs on the loop's thread. Invariants: a key whose bytes the daemon itself has just read and hashed
is none; a slot found damaged is given up as soon as no window and no lease keeps it.
"""

from __future__ import annotations

from .cache import SlotCache
from .log import log
from .metrics import Counters
from .outcome import Load
from .rehash import Finding, Rehash
from .verified import Verified


class Suspects:
    """Has slots hashed again and gives up those that are not what they were."""

    def __init__(
        self, cache: SlotCache, rehash: Rehash, verified: Verified, counters: Counters
    ) -> None:
        self._cache = cache
        self._rehash = rehash
        self._verified = verified
        self._counters = counters
        self._n_experts = cache.n_experts
        self._damaged: list[Finding] = []

    @property
    def n_waiting(self) -> int:
        """Slots still to be hashed."""
        return self._rehash.n_waiting

    def begin(self, *, all_slots: bool) -> None:
        """Hash what a former daemon left unverified, or everything."""
        if all_slots:
            self._verified.clear()
        waiting = [
            (layer, expert, slot)
            for layer, expert, slot in self._cache.resident()
            if layer * self._n_experts + expert not in self._verified
        ]
        if waiting:
            log(f"hashing {len(waiting)} experts again in the background")
        self._rehash.begin(waiting)

    def engine_died(self) -> None:
        """An engine ended without a word: whatever it could reach is suspect."""
        self.begin(all_slots=True)

    def was_read(self, load: Load) -> None:
        """The daemon has read and hashed a key, and it stands in the table."""
        self._verified.add(load.layer * self._n_experts + load.expert)

    def take_findings(self) -> None:
        """Note what the hashes say."""
        for finding in self._rehash.drain():
            self._counters.rehashed += 1
            if finding.is_good:
                self._verified.add(finding.layer * self._n_experts + finding.expert)
                continue
            self._counters.hash_mismatches += 1
            where = f"layer {finding.layer} expert {finding.expert}: slot {finding.slot}"
            log(f"{where} is damaged in memory: it will be read again")
            self._damaged.append(finding)

    def give_up_damaged(self) -> None:
        """Take damaged slots out of the table, those that nothing keeps now."""
        if self._damaged and not self._cache.window_open:
            self._damaged = [
                one
                for one in self._damaged
                if not self._cache.give_up(one.layer, one.expert, one.slot, one.generation)
            ]

    def close(self) -> None:
        """Hash no further."""
        self._rehash.close()
