"""Readers' messages: slots leased to other programs until they give them back or leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from protocol.wire.messages import Busy, Cancel, Fetch, Leased, Release

from .engine_desk import key_fault
from .outbox import Outbox
from .outcome import FetchAnswer
from .sessions import Session, Sessions
from .works import Works

RETRY_MS = 20
MAX_WAIT_MS = 600_000


class FetchDesk:
    """Serves leases; a fetch that its wait_ms does not see answered ends with what is there."""

    def __init__(
        self,
        sessions: Sessions,
        outbox: Outbox,
        works: Works,
        loop: asyncio.AbstractEventLoop,
        settle: Callable[[], None],
    ) -> None:
        self._sessions = sessions
        self._outbox = outbox
        self._cache = works.loading.cache
        self._counters = works.counters
        self._loop = loop
        self._settle = settle
        self._timers: dict[tuple[int, int], asyncio.TimerHandle] = {}

    def fetch(self, session: Session, message: Fetch) -> None:
        """Lease the keys; the answer comes when all are there or the wait has ended."""
        self._counters.fetches += 1
        self._cache.fetch(session.number, message.request, message.keys)
        wait = min(message.wait_ms, MAX_WAIT_MS) / 1e3
        self._timers[session.number, message.request] = self._loop.call_later(
            wait, self._wait_ended, session.number, message.request
        )

    def release(self, session: Session, message: Release) -> None:
        """Take leases back."""
        self._cache.release(session.number, message.leases)

    def cancel(self, session: Session, message: Cancel) -> None:
        """Answer a waiting fetch now with what is there."""
        if (session.number, message.request) in self._timers:
            self._cache.end_fetch(session.number, message.request, "CANCELLED")

    def answer(self, answer: FetchAnswer) -> None:
        """Send what became of a fetch, where its reader is still there."""
        timer = self._timers.pop((answer.client, answer.request), None)
        if timer is not None:
            timer.cancel()
        session = self._sessions.by_number.get(answer.client)
        if session is None:
            return
        if answer.busy:
            self._outbox.send(session, Busy(answer.request, RETRY_MS))
            return
        leases = tuple((one.layer, one.expert, one.slot, one.generation) for one in answer.leases)
        errors = tuple(sorted(key_fault(fault) for fault in answer.errors))
        self._outbox.send(session, Leased(answer.request, leases, errors))

    def client_gone(self, session: Session) -> None:
        """Free the leases and end the fetches of a client that left."""
        for key in [key for key in self._timers if key[0] == session.number]:
            self._timers.pop(key).cancel()
        self._cache.client_gone(session.number)

    def _wait_ended(self, client: int, request: int) -> None:
        if self._timers.pop((client, request), None) is not None:
            self._cache.end_fetch(client, request)
            self._settle()
            self._outbox.look_again()
