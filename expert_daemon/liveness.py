"""Which clients are stopped: silent ones are pinged, and one that does not answer is stuck.

A stuck client is only shown, and keeps what it has: an engine its slots, since what it launched
may read them. It ends with its process or its connection, like any other.

Runs on the loop's thread. Invariants: a client has one unanswered Ping at most, so that nothing
gathers in front of one that does not read.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from protocol.wire.messages import Ping

from .log import ClientLog
from .outbox import Outbox
from .sessions import Session, Sessions

SILENT_S = 5.0  # then it is pinged
STUCK_S = 10.0  # unanswered for so long


class Liveness:
    """Looks at every session when `look` is called, once a second or so."""

    def __init__(
        self,
        sessions: Sessions,
        outbox: Outbox,
        clients: ClientLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sessions = sessions
        self._outbox = outbox
        self._clients = clients
        self._clock = clock
        self._n_pings = 0

    def heard(self, session: Session) -> None:
        """Anything came from a session's client."""
        session.heard_at = self._clock()
        session.pinged_at = 0.0
        if session.is_stuck:
            session.is_stuck = False
            self._clients.note(f"{session.who} answers again")

    def look(self) -> None:
        """Ping who has been silent; note who has not answered."""
        now = self._clock()
        for session in list(self._sessions.by_number.values()):
            if not session.is_attached:
                continue
            if session.pinged_at == 0.0:
                if now - session.heard_at > SILENT_S:
                    self._ping(session, now)
            elif now - session.pinged_at > STUCK_S and not session.is_stuck:
                session.is_stuck = True
                self._clients.note(
                    f"session {session.number}: {session.role} of pid {session.pid} has not "
                    f"answered a Ping for {STUCK_S:g} s: stuck"
                )

    def _ping(self, session: Session, now: float) -> None:
        self._n_pings += 1
        session.pinged_at = now
        self._outbox.send(session, Ping(self._n_pings))
