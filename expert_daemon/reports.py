"""What the daemon tells about itself: the keys it holds, its counters and settings."""

from __future__ import annotations

import os
import time
from dataclasses import asdict

import numpy as np

from protocol.wire.messages import KeyList, Keys, Ping, Pong, StatList, Stats

from .advice_desk import AdviceDesk
from .copies import COPY_NAMES
from .outbox import Outbox
from .quarantine import MOST_LISTED
from .sessions import Session, Sessions
from .works import Value, Works

MOST_STUCK_LISTED = 100
KEY_RECORD = np.dtype([("layer", "<u2"), ("expert", "<u2"), ("slot", "<i4")])


class Reports:
    """Answers Keys, Stats and Ping."""

    def __init__(
        self, sessions: Sessions, outbox: Outbox, works: Works, advice: AdviceDesk
    ) -> None:
        self._sessions = sessions
        self._outbox = outbox
        self._works = works
        self._advice = advice
        self._cache = works.loading.cache
        self._started = time.monotonic()
        self._keys = b""  # what Keys was answered last, of table version `_keys_version`
        self._keys_version = -1

    def keys(self, session: Session, message: Keys) -> None:
        """Send every READY key with its slot."""
        version = self._cache.table_version
        if version != self._keys_version:
            self._keys, self._keys_version = self._records(), version
        self._outbox.send(session, KeyList(message.request, version, self._keys))

    def _records(self) -> bytes:
        keys, slots = self._cache.resident_keys()
        records = np.empty(len(keys), KEY_RECORD)
        records["layer"], records["expert"] = np.divmod(keys, self._cache.n_experts)
        records["slot"] = slots
        return records.tobytes()

    def stats(self, session: Session, message: Stats) -> None:
        """Send all counters and settings."""
        self._outbox.send(session, StatList(message.request, self.values()))

    def ping(self, session: Session, message: Ping) -> None:
        """Send a sign of life."""
        self._outbox.send(session, Pong(message.request))

    def values(self) -> dict[str, Value]:
        """Return all counters and settings by name."""
        engine = self._sessions.engine
        works, arena = self._works, self._works.arena
        layout = arena.view.layout
        n_slots = arena.identity.n_slots
        return {
            **works.settings,
            **asdict(self._cache.counters),
            **works.counters.values(),
            **works.tracing.values(),
            **works.lifetime.values(),
            "pid": os.getpid(),
            "generation": arena.identity.daemon_generation,
            "uptime_s": time.monotonic() - self._started,
            "n_slots": n_slots,
            "slot_bytes": layout.slot_bytes,
            "arena_bytes": layout.populated_bytes(n_slots),
            "ring_rows": layout.ring_rows,
            "table_version": self._cache.table_version,
            "n_resident": self._cache.n_resident,
            "n_loading": self._cache.n_loading,
            "warm_left": self._advice.n_warm_left,
            "hints_ended": int(self._cache.hints_ended),
            "queue_depth": works.threads.depth(),
            **{f"queue_{lane}": depth for lane, depth in works.threads.depths().items()},
            **works.loading.read_times.values(),
            "read_retries": works.ranges.n_retries,
            "checksum_retries": works.reader.n_checksum_retries,
            "mirror_fallbacks": works.reader.n_fallbacks,
            **self._rates(),
            "checksums_known": works.reader.checksums.n_known,
            "rehash_waiting": works.loading.suspects.n_waiting,
            "reads_not_back": works.loading.faults.n_lost,
            **self._quarantined(),
            "row_hits": works.rows.counts.hits,
            "row_pages": works.rows.counts.pages,
            "rows_cached": works.rows.n_cached,
            "n_clients": len(self._sessions.by_number),
            "engine_pid": engine.pid if engine else 0,
            "stuck_clients": len(self._sessions.stuck),
            "stuck": self._stuck(),
        }

    def _quarantined(self) -> dict[str, Value]:
        """Each quarantined copy with file, offset and reason, as far as they can be listed."""
        faults = self._works.loading.faults
        values: dict[str, Value] = {
            "quarantined": faults.n_quarantined,
            "quarantined_copies": len(faults.quarantine),
        }
        for entry in faults.quarantine.entries()[:MOST_LISTED]:
            name = f"quarantine layer {entry.layer} expert {entry.expert}"
            values[f"{name} {COPY_NAMES[entry.copy]}" if entry.copy else name] = entry.reason
        return values

    def _rates(self) -> dict[str, Value]:
        """Bytes a second of each copy's recent reads."""
        rates = self._works.reader.copies.rates.rates()
        return {f"rate_{name}": rate for name, rate in zip(COPY_NAMES, rates, strict=True)}

    def _stuck(self) -> str:
        """Who does not answer a Ping: role and process of each."""
        found = [f"{session.role} {session.pid}" for session in self._sessions.stuck]
        return ", ".join(found[:MOST_STUCK_LISTED])
