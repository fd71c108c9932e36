"""Copies of experts whose bytes cannot be trusted: read twice with a checksum that is not theirs.

A copy stays here, over restarts too, until its key is lifted or the model's fingerprint changes.
What is here counts at once; it is written by another thread, which `changed` wakes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from .copies import COPY_NAMES, HOME, Key
from .log import log
from .model_state import ModelState

NAME = "quarantine"
MOST_LISTED = 256


@dataclass(frozen=True, slots=True)
class Entry:
    """One copy of a key and where its bytes are."""

    layer: int
    expert: int
    path: str
    offset: int  # of the key's first byte in the file
    reason: str  # in words, with all of these
    copy: int = HOME


class Quarantine:
    """The entries by key and copy; one thread, and another that saves."""

    def __init__(self, n_layers: int, n_experts: int, state: ModelState | None = None) -> None:
        """Begin with what an earlier daemon saved in `state`."""
        self.changed = threading.Event()
        self._state = state
        self._lock = threading.Lock()  # between changes and `save`
        self._entries: dict[tuple[int, int, int], Entry] = {}
        self._n_changes = 0
        self._n_saved = 0
        saved = state.read(NAME) if state is not None else None
        if saved is None:
            return
        for entry in _entries(saved):
            if 0 <= entry.layer < n_layers and 0 <= entry.expert < n_experts:
                self._entries[entry.layer, entry.expert, entry.copy] = entry

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> list[Entry]:
        """All entries, ascending by key and copy."""
        return [self._entries[key] for key in sorted(self._entries)]

    def of_key(self, key: Key) -> list[Entry]:
        """The entries of a key's copies."""
        found = (self._entries.get((*key, copy)) for copy in range(len(COPY_NAMES)))
        return [entry for entry in found if entry is not None]

    def add(self, entry: Entry) -> None:
        """Put a copy here; its first entry stays."""
        place = (entry.layer, entry.expert, entry.copy)
        with self._lock:
            if self._entries.setdefault(place, entry) is not entry:
                return
            self._n_changes += 1
        log(f"quarantined: {entry.reason}")
        self.changed.set()

    def lift(self, keys: Iterable[Key]) -> list[Key]:
        """Take keys out; returns those that were here."""
        lifted = []
        with self._lock:
            for key in keys:
                entries = self.of_key(key)
                for entry in entries:
                    del self._entries[entry.layer, entry.expert, entry.copy]
                if entries:
                    lifted.append(key)
            self._n_changes += len(lifted)
        if lifted:
            log(f"quarantine lifted from {len(lifted)} experts")
            self.changed.set()
        return lifted

    def save(self) -> None:
        """Write the entries where they have changed since the last time."""
        if self._state is None or not self._state.may_save or self._n_changes == self._n_saved:
            return
        with self._lock:
            n_changes, entries = self._n_changes, list(self._entries.values())
        # One by one: a long text in one go would keep the interpreter from the loop.
        content = f"[{', '.join(json.dumps(asdict(entry)) for entry in entries)}]"
        if self._state.write(NAME, content.encode()):
            self._n_saved = n_changes


def _entries(saved: bytes) -> list[Entry]:
    try:
        found = json.loads(saved)
    except ValueError:
        return []
    return [_entry(one) for one in found if isinstance(one, dict)]


def _entry(raw: dict[str, Any]) -> Entry:
    known = {field.name: raw.get(field.name) for field in fields(Entry)}
    return Entry(**known | {"copy": raw.get("copy", HOME)})  # type: ignore[arg-type]
