"""What reads that went wrong mean for later ones: quarantine, and reads that never return.

Runs on the loop's thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from protocol.wire.limits import MAX_TEXT

from .cache import SlotCache
from .copies import Key
from .outcome import Load
from .quarantine import Entry, Quarantine
from .reader import ExpertReader, ReadResult

MOST_LOST = 2  # reads of one expert that have not returned: each keeps a slot and a thread


class ReadFaults:
    """Bars the keys in `cache` that are not to be read."""

    def __init__(self, cache: SlotCache, reader: ExpertReader, quarantine: Quarantine) -> None:
        """Bar what was quarantined before."""
        self.quarantine = quarantine
        self._cache = cache
        self._reader = reader
        self._lost: Counter[Key] = Counter()
        for entry in quarantine.entries():
            self._bar(entry)

    @property
    def n_lost(self) -> int:
        """Reads given up that have not returned yet."""
        return self._lost.total()

    @property
    def n_quarantined(self) -> int:
        """Keys of which no copy is good."""
        keys = {(entry.layer, entry.expert) for entry in self.quarantine.entries()}
        return sum(self._is_quarantined(key) for key in keys)

    def note(self, result: ReadResult) -> None:
        """A read has ended: a copy whose bytes were wrong twice is not read again."""
        layer, expert = result.key
        for fault in result.faults:
            if fault.code == "CHECKSUM":
                path, offset = self._reader.place(result.key, fault.copy)
                reason = f"layer {layer} expert {expert}: {fault.text}"
                entry = Entry(layer, expert, path, offset, reason, fault.copy)
                self.quarantine.add(entry)
                self._bar(entry)

    def given_up(self, load: Load, text: str) -> None:
        """A read that does not return is waited for no longer."""
        key = (load.layer, load.expert)
        self._lost[key] += 1
        if self._lost[key] >= MOST_LOST and not self._is_quarantined(key):
            self._cache.bar(*key, "TIMEOUT", text)

    def returned(self, load: Load) -> None:
        """A read that was given up has returned after all."""
        key = (load.layer, load.expert)
        self._lost[key] -= 1
        if self._lost[key] < MOST_LOST and not self._is_quarantined(key):
            self._cache.unbar(*key)
        if not self._lost[key]:
            del self._lost[key]

    def lift(self, keys: Iterable[Key]) -> list[Key]:
        """Read these keys again, taking their bytes as they come; returns which were quarantined.

        A source's own checksums still hold.
        """
        lifted = self.quarantine.lift(keys)
        for key in lifted:
            self._reader.checksums.forget(*key)
            self._reader.copies.trust(key)
            self._cache.unbar(*key)
        return lifted

    def _is_quarantined(self, key: Key) -> bool:
        return not self._reader.copies.good(key)

    def _bar(self, entry: Entry) -> None:
        """Read this copy no more; a key of which no other is good is not to be read."""
        key = (entry.layer, entry.expert)
        if not self._reader.copies.distrust(key, entry.copy):
            reasons = "; ".join(one.reason for one in self.quarantine.of_key(key))
            self._cache.bar(*key, "QUARANTINED", reasons[:MAX_TEXT])
