"""Messages on their way to clients. A client that cannot be sent to is dropped, later."""

from __future__ import annotations

from collections.abc import Callable

from protocol.wire.codec import encode
from protocol.wire.messages import Message, Refused

from .log import log
from .metrics import Counters
from .router import Router
from .sessions import Session

MAX_REFUSALS_LOGGED = 20


class Outbox:
    """Encodes and sends; `lost(session)` is called from here where a session's client is stuck."""

    def __init__(
        self, router: Router, generation: int, counters: Counters, lost: Callable[[Session], None]
    ) -> None:
        self._router = router
        self._generation = generation
        self._counters = counters
        self._lost = lost
        self._n_refusals_logged = 0

    def send(self, session: Session, message: Message) -> None:
        """Send to a session's client."""
        if session.is_lost:
            return
        frame = encode(message, session.number, self._generation)
        if not self._router.send(session.route, frame):
            session.is_lost = True
            self._counters.clients_dropped += 1
            log(f"session {session.number} (pid {session.pid}) does not read: dropped")
            self._lost(session)

    def refuse(
        self,
        route: bytes,
        refusal: Refused,
        session: int = 0,
        *,
        pid: int = 0,
        is_repeated: bool = False,
    ) -> None:
        """Say no to whoever sent a message; nobody minds where that cannot be delivered.

        pid           of whoever it was, as it says; 0 where it did not
        is_repeated   the same was refused before: it is counted, not logged
        """
        self._counters.frames_refused += 1
        if not is_repeated and self._n_refusals_logged < MAX_REFUSALS_LOGGED:
            self._n_refusals_logged += 1
            whom = f" to pid {pid}" if pid else ""
            log(f"refused ({refusal.reason}){whom}: {refusal.text}")
        frame = encode(refusal, session, self._generation)
        self._router.send(route, frame, patient=session != 0)

    def look_again(self) -> None:
        """Call after messages were sent in answer to something other than a message."""
        self._router.look_again()
