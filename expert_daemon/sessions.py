"""Who is connected: sessions by their ZeroMQ route and by number, and the one engine.

No sockets here. Invariants: a session's number is never used again; of those that said Hello as the
engine the first that attaches is the engine, and beside it there is no other.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Session:
    """One client since its Welcome."""

    number: int
    route: bytes
    role: str
    pid: int
    is_attached: bool = False  # it holds a descriptor connection, its sign of life
    is_lost: bool = False  # it could not be sent to and is about to be ended
    may_read: bool = False  # it holds the arena, or held it when its client was lost
    is_stuck: bool = False  # a Ping is unanswered for long
    heard_at: float = 0.0  # when anything last came from it [s, monotonic]
    pinged_at: float = 0.0  # when it was sent the Ping that it has not answered; 0: none
    sent_version: int = 0  # table version that an engine has been told

    @property
    def who(self) -> str:
        """How the log names it."""
        return f"session {self.number} (pid {self.pid})"


@dataclass(slots=True)
class Sessions:
    """All clients."""

    by_route: dict[bytes, Session] = field(default_factory=dict)
    by_number: dict[int, Session] = field(default_factory=dict)
    engine: Session | None = None
    n_begun: int = 0

    def begin(self, route: bytes, role: str, pid: int) -> Session:
        """Return a new session; its route has none."""
        assert route not in self.by_route
        self.n_begun += 1
        session = Session(self.n_begun, route, role, pid, heard_at=time.monotonic())
        self.by_route[route] = session
        self.by_number[session.number] = session
        return session

    @property
    def waiting_engines(self) -> list[Session]:
        """Those that said Hello as the engine and are not attached, by number."""
        all_engines = [s for s in self.by_number.values() if s.role == "engine"]
        return [session for session in all_engines if session is not self.engine]

    def end(self, session: Session) -> bool:
        """Forget a session; False where it had ended before."""
        if self.by_number.pop(session.number, None) is None:
            return False
        del self.by_route[session.route]
        if self.engine is session:
            self.engine = None
        return True

    @property
    def stuck(self) -> list[Session]:
        """Those that do not answer a Ping, by number."""
        return [session for session in self.by_number.values() if session.is_stuck]
