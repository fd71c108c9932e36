"""What reads that went wrong mean for later ones: quarantine, and reads that never return.

Runs on the loop's thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

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

    def failed(self, result: ReadResult) -> None:
        """A read has failed: bytes that are wrong twice are not read again."""
        if result.code == "CHECKSUM":
            path, offset = self._reader.place(result.key)
            entry = Entry(*result.key, path, offset, result.text)
            self.quarantine.add(entry)
            self._bar(entry)

    def given_up(self, load: Load, text: str) -> None:
        """A read that does not return is waited for no longer."""
        key = (load.layer, load.expert)
        self._lost[key] += 1
        if self._lost[key] >= MOST_LOST and not self.quarantine.of_key(key):
            self._cache.bar(*key, "TIMEOUT", text)

    def returned(self, load: Load) -> None:
        """A read that was given up has returned after all."""
        key = (load.layer, load.expert)
        self._lost[key] -= 1
        if self._lost[key] < MOST_LOST and not self.quarantine.of_key(key):
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
            self._cache.unbar(*key)
        return lifted

    def _bar(self, entry: Entry) -> None:
        self._cache.bar(entry.layer, entry.expert, "QUARANTINED", entry.reason)
