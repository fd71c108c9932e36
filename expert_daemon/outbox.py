"""Messages on their way to clients. A client that cannot be sent to is dropped, later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from protocol.wire.codec import CodecError, encode
from protocol.wire.messages import Message, Refused

from .log import ClientLog
from .metrics import Counters
from .router import Router
from .sessions import Session

MOST_CHARACTERS = 1000  # of a refusal's text


class Outbox:
    """Encodes and sends; `lost(session)` is called from here where a session's client is stuck.

    A message that cannot be encoded is refused in its place: it ends neither loop nor session.
    """

    def __init__(
        self,
        router: Router,
        generation: int,
        counters: Counters,
        lost: Callable[[Session], None],
        clients: ClientLog,
    ) -> None:
        self._router = router
        self._generation = generation
        self._counters = counters
        self._lost = lost
        self._clients = clients

    def send(self, session: Session, message: Message) -> None:
        """Send to a session's client; `limit` where the message is none that may be sent."""
        if session.is_lost:
            return
        try:
            frame = encode(message, session.number, self._generation)
        except CodecError as error:
            request = int(getattr(message, "request", 0))
            refusal = Refused("limit", f"the answer cannot be sent: {error}", 0, 0, request)
            self.refuse(session.route, refusal, session, pid=session.pid)
            return
        self._send(session, frame)

    def refuse(
        self,
        route: bytes,
        refusal: Refused,
        session: Session | None = None,
        *,
        pid: int = 0,
        is_repeated: bool = False,
    ) -> None:
        """Say no to whoever sent a message; who has no session need not read it.

        pid           of whoever it was, as it says; 0 where it did not
        is_repeated   the same was refused before: it is counted, not logged
        """
        refusal = replace(refusal, text=_sendable(refusal.text))
        self._counters.frames_refused += 1
        if not is_repeated:
            whom = f" to pid {pid}" if pid else ""
            self._clients.note(f"refused ({refusal.reason}){whom}: {refusal.text}")
        if session is None:
            self._router.send(route, encode(refusal, 0, self._generation), keep=False)
        elif not session.is_lost:
            self._send(session, encode(refusal, session.number, self._generation))

    def drop(self, session: Session) -> None:
        """A session's client is gone or does not read."""
        if session.is_lost:
            return
        session.is_lost = True
        self._counters.clients_dropped += 1
        self._clients.note(f"{session.who} does not read: dropped")
        self._lost(session)

    def _send(self, session: Session, frame: bytes) -> None:
        if not self._router.send(session.route, frame):
            self.drop(session)

    def look_again(self) -> None:
        """Call after messages were sent in answer to something other than a message."""
        self._router.look_again()


def _sendable(text: str) -> str:
    """Return a text that the codec takes, however long or odd it is, names of files included."""
    if len(text) > MOST_CHARACTERS:
        text = f"{text[: MOST_CHARACTERS - 3]}..."
    return text.encode("utf-8", "replace").decode()
