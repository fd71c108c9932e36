"""The engine's messages: write windows, acknowledgements, the table; and what is pushed to it."""

from __future__ import annotations

import os

import numpy as np

from protocol.arena.plan import EPOCH_LAUNCHED
from protocol.wire.messages import (
    Ack,
    Cancel,
    Changes,
    Consumed,
    MissRequest,
    Resync,
    SlotChanges,
    Stream,
    Touch,
    Welcome,
)

from .leases import share_of
from .loading import WindowReads
from .outbox import Outbox
from .outcome import KeyFault, RequestRefused, WindowAnswer
from .sessions import Session, Sessions
from .works import Works

REMEMBERED = 16  # answered requests whose bytes and milliseconds are still known


class EngineDesk:
    """Serves the one engine."""

    def __init__(self, sessions: Sessions, outbox: Outbox, works: Works) -> None:
        self._sessions = sessions
        self._outbox = outbox
        self._arena = works.arena
        self._loading = works.loading
        self._cache = works.loading.cache
        self._size = works.size
        self._counters = works.counters
        self._tracing = works.tracing
        self._descriptor_address = str(works.descriptor_path)
        self._reads: dict[int, WindowReads] = {}

    def welcome(self, session: Session, request: int = 0) -> Welcome:
        """Return the whole table for a session, which has been told all of it then.

        request  of the Resync that it answers; 0: of Hello
        """
        identity = self._arena.identity
        layout = self._arena.view.layout
        session.sent_version = self._cache.table_version
        return Welcome(
            session=session.number,
            generation=identity.daemon_generation,
            arena_id=identity.arena_id,
            arena_bytes=self._arena.file_bytes,
            n_layers=layout.n_layers,
            n_experts=layout.n_experts,
            n_slots=identity.n_slots,
            slot_bytes=layout.slot_bytes,
            max_experts=self._size.budget.max_experts,
            lease_quota=share_of(self._size.budget.lease_quota),
            descriptor_address=self._descriptor_address,
            version=session.sent_version,
            table=self._arena.view.table.tobytes(),
            scores=self._scores(identity.n_slots),
            request=request,
        )

    @property
    def _epoch_launched(self) -> int:
        """The engine's launch counter; to be read after the message that acknowledges."""
        return int(self._arena.view.epochs[EPOCH_LAUNCHED])

    def _scores(self, n_slots: int) -> bytes:
        scores = self._arena.view.headers["score"][:n_slots]
        return bytes(np.nan_to_num(scores).astype("<f4").data)

    def welcomed(self) -> None:
        """An engine is about to be sent the whole table; nothing of it is acknowledged yet."""
        self._reads.clear()
        self._cache.engine_attached()

    def lost(self) -> None:
        """The engine cannot be reached, but what it launched may still read the arena."""
        self._cache.resync()

    def gone(self) -> None:
        """No engine reads the arena any more."""
        self._cache.engine_gone()

    def miss(self, session: Session, message: MissRequest) -> None:
        """Open a write window; the answer comes when its reads have ended, if any."""
        n_experts, size = len(message.experts), self._size
        if n_experts > size.budget.max_experts and n_experts > size.max_experts:
            text = f"{n_experts} experts, at most {size.max_experts} at once"
            raise RequestRefused("limit", f"request {message.request}: {text}")
        is_answered = self._answer_ahead(session, message)
        self._counters.miss_requests += 1
        self._count_reads(message.request)
        self._cache.open_window(
            message.request,
            message.step,
            message.layer,
            message.experts,
            message.busy,
            message.applied,
            message.epoch_done,
            self._epoch_launched,
            is_answered=is_answered,
        )
        if message.hints:
            self._cache.hint(message.step, message.hints)

    def _answer_ahead(self, session: Session, message: MissRequest) -> bool:
        """Send the answer where nothing misses; what it means to the cache can wait for that."""
        told = self._cache.foretell(
            message.request, message.layer, message.experts, message.applied
        )
        if told is None:
            return False
        slots, table = told
        session.sent_version = max(session.sent_version, table.to_version)
        self._outbox.send(
            session,
            SlotChanges(
                message.request,
                table.from_version,
                table.to_version,
                slots,
                table.changes,
                errors=(),
                n_bytes=0,
                read_ms=0.0,
                final=True,
            ),
        )
        os.sched_yield()  # to ZeroMQ's thread, which may have to run on this core
        return True

    def stream(self, _session: Session, message: Stream) -> None:
        """Open a stream's window; parts of the answer come as its reads end."""
        self._count_reads(message.request)
        self._cache.open_stream(
            message.request,
            message.step,
            message.layer,
            message.experts,
            message.window,
            message.busy,
            message.applied,
            message.epoch_done,
            self._epoch_launched,
            message.ahead,
        )

    def consumed(self, _session: Session, message: Consumed) -> None:
        """The slots of a stream's experts may be written again."""
        self._cache.consume(message.request, message.up_to)

    def _count_reads(self, request: int) -> None:
        if request not in self._reads and not self._cache.window_open:
            self._loading.window = self._reads[request] = WindowReads()
            for number in list(self._reads)[:-REMEMBERED]:
                del self._reads[number]

    def cancel(self, _session: Session, message: Cancel) -> None:
        """Close the window with what there is."""
        self._cache.cancel(message.request)

    def ack(self, _session: Session, message: Ack) -> None:
        """The engine has applied changes, so retired slots may become free."""
        self._cache.ack(message.applied, message.epoch_done, self._epoch_launched)

    def resync(self, session: Session, message: Resync) -> None:
        """Send the whole table; an open window has ended with that."""
        self._cache.resync()
        self._outbox.send(session, self.welcome(session, message.request))

    def touch(self, _session: Session, message: Touch) -> None:
        """Count a step's picks, and record them where a trace is on."""
        self._tracing.record(message.step, message.picks)
        picks = np.frombuffer(message.picks, "<u2").reshape(-1, 2)
        self._counters.touches += self._cache.touch(message.step, picks)

    def answer(self, answer: WindowAnswer) -> None:
        """Send the final answer of a request to the engine, where it is still there."""
        session = self._sessions.engine
        if session is None:
            return
        reads = self._reads.get(answer.request, WindowReads())
        n_bytes = reads.n_bytes + self._loading.take_ahead_bytes()
        read_ms = reads.read_ms
        if not answer.final:
            reads.clear()
        session.sent_version = max(session.sent_version, answer.table.to_version)
        self._outbox.send(
            session,
            SlotChanges(
                request=answer.request,
                from_version=answer.table.from_version,
                to_version=answer.table.to_version,
                slots=answer.slots,
                changes=answer.table.changes,
                errors=tuple(key_fault(fault) for fault in answer.errors),
                n_bytes=n_bytes,
                read_ms=read_ms,
                final=answer.final,
            ),
        )

    def push_changes(self) -> None:
        """Send what changed outside of a window since the engine was told anything."""
        session = self._sessions.engine
        if session is None or not session.is_attached or self._cache.window_open:
            return
        if self._cache.table_version > session.sent_version:
            table = self._cache.changes_since(session.sent_version)
            session.sent_version = table.to_version
            self._outbox.send(session, Changes(table.from_version, table.to_version, table.changes))


def key_fault(fault: KeyFault) -> tuple[int, int, str, str]:
    """Return a key's fault as messages carry it."""
    return (fault.layer, fault.expert, fault.code, fault.text)
