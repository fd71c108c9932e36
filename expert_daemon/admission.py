"""Who may come in and who has left: Hello, the descriptor connection, Bye, processes that ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from protocol.arena.attach import AttachRequest
from protocol.arena.fds import PeerCredentials
from protocol.errors import ProtocolError
from protocol.wire.limits import ATTACH_MS
from protocol.wire.messages import PROTOCOL_VERSION, Bye, Hello, Refused

from .descriptor_server import Grant
from .engine_desk import EngineDesk
from .engine_watch import EngineWatch
from .fetch_desk import FetchDesk
from .log import ClientLog, log
from .outbox import Outbox
from .sessions import Session, Sessions
from .works import Works

BUSY_RETRY_MS = 200
MAX_REMEMBERED = 20  # processes that were told of the engine in their way


class Admission:
    """Begins and ends sessions. `hang_up(session number)` closes a descriptor connection."""

    def __init__(
        self,
        sessions: Sessions,
        outbox: Outbox,
        works: Works,
        loop: asyncio.AbstractEventLoop,
        *,
        engines: EngineDesk,
        fetches: FetchDesk,
        hang_up: Callable[[int], None],
        settle: Callable[[], None],
        clients: ClientLog,
    ) -> None:
        self._sessions = sessions
        self._outbox = outbox
        self._loop = loop
        self._arena = works.arena
        self._rows = works.rows
        self._counters = works.counters
        self._top_k_batch = works.top_k_batch
        self._engines = engines
        self._fetches = fetches
        self._hang_up = hang_up
        self._settle = settle
        self._clients = clients
        self._suspects = works.loading.suspects
        self._refused_as_busy: set[int] = set()  # pids, since the last engine came
        self.watch = EngineWatch(loop, self._engine_died)
        if works.arena.engine_pid:
            log(f"engine {works.arena.engine_pid} lives on from before: waiting for it")
            self.watch.begin(works.arena.engine_pid, connected=False)

    def hello(self, route: bytes, message: Hello) -> None:
        """Welcome a client or refuse it, both sides named."""
        self._counters.hellos += 1
        refusal = self._objection(message) or self._engine_in_the_way(route, message)
        if refusal is not None:
            is_repeated = refusal.reason == "busy" and message.pid in self._refused_as_busy
            self._outbox.refuse(route, refusal, pid=message.pid, is_repeated=is_repeated)
            if refusal.reason == "busy" and len(self._refused_as_busy) < MAX_REMEMBERED:
                self._refused_as_busy.add(message.pid)
            return
        previous = self._sessions.by_route.get(route)
        if previous is not None:
            self.end(previous)
        session = self._sessions.begin(route, message.role, message.pid)
        if session.role == "engine":  # several may wait: anybody can say Hello
            self._engines.welcomed()
        self._loop.call_later(ATTACH_MS / 1e3, self._check_attached, session)
        self._outbox.send(session, self._engines.welcome(session))

    def attach(self, request: AttachRequest, peer: PeerCredentials) -> Grant:
        """Return what a descriptor connection is granted; raises ProtocolError."""
        session = self._sessions.by_number.get(request.session)
        if session is None or request.generation != self._arena.identity.daemon_generation:
            raise ProtocolError(f"no session {request.session} of {request.generation}: say Hello")
        if session.is_attached:
            raise ProtocolError(f"session {request.session} is attached already")
        if peer.pid != session.pid:
            raise ProtocolError(f"session {request.session} is pid {session.pid}, not {peer.pid}")
        if session.role == "engine":
            self._take_place(session)
        session.is_attached = session.may_read = True
        return Grant(session.number, session.role == "engine")

    def _take_place(self, session: Session) -> None:
        """Make a session the engine, and have the others that wait begin again."""
        if self.watch.absent and self.watch.pid != session.pid:
            raise ProtocolError(f"engine {self.watch.pid} may still read the arena")
        for other in self._sessions.waiting_engines:
            if other is not session:
                self.end(other)
        self._sessions.engine = session
        self._refused_as_busy.clear()
        self.watch.begin(session.pid, connected=True)
        self._arena.note_engine(session.pid)

    def bye(self, session: Session, _message: Bye) -> None:
        """The client leaves in order: an engine reads nothing more."""
        session.may_read = False
        self.end(session)

    def disconnected(self, number: int) -> None:
        """A session's descriptor connection has ended."""
        session = self._sessions.by_number.get(number)
        if session is not None:
            self.end(session)
            self._settle()
            self._outbox.look_again()

    def end(self, session: Session) -> None:
        """End a session whose client is gone, stuck or begins anew."""
        is_engine = session is self._sessions.engine
        if not self._sessions.end(session):
            return
        self._hang_up(session.number)
        self._rows.client_gone(session.number)
        if is_engine and session.may_read:
            self._engines.lost()
            self.watch.disconnected()
        elif is_engine:
            self.watch.end()
            self._engine_gone()
        elif session.role == "engine":
            if not (self.watch.pid or self._sessions.waiting_engines):
                self._engine_gone()
        else:
            self._fetches.client_gone(session)

    def _objection(self, message: Hello) -> Refused | None:
        ours = PROTOCOL_VERSION
        if message.version[0] != ours[0]:
            text = f"the client speaks version {message.version}, the daemon {ours}"
            return Refused("version", text, 0, 0)
        fingerprint = self._arena.identity.fingerprint
        is_reader = message.role == "reader"
        if message.fingerprint != fingerprint and not (is_reader and not message.fingerprint):
            text = f"the client has model {message.fingerprint.hex()}, the daemon serves "
            return Refused("fingerprint", text + fingerprint.hex(), 0, 0)
        if message.top_k_batch > self._top_k_batch:
            text = (
                f"the engine may pick {message.top_k_batch} experts at once, the arena was "
                f"planned for {self._top_k_batch}: start the daemon with a larger --batch"
            )
            return Refused("limit", text, 0, 0)
        return None

    def _engine_in_the_way(self, route: bytes, message: Hello) -> Refused | None:
        if message.role != "engine":
            return None
        pid = 0
        engine = self._sessions.engine
        if engine is not None:
            pid = 0 if engine.route == route else engine.pid  # 0: it begins anew
        elif self.watch.absent and self.watch.pid != message.pid:
            pid = self.watch.pid
        if pid == 0:
            return None
        return Refused("busy", f"another engine (pid {pid}) is attached", BUSY_RETRY_MS, pid)

    def _check_attached(self, session: Session) -> None:
        if not session.is_attached and self._sessions.by_number.get(session.number) is session:
            self._clients.note(f"{session.who} did not attach in time: ended")
            self.end(session)
            self._settle()
            self._outbox.look_again()

    def _engine_died(self) -> None:
        """It ended without a word: by a signal, or because its device failed."""
        log(f"engine {self.watch.last_pid} died without Bye")
        for session in self._sessions.waiting_engines:  # of that process, by what they said
            self.end(session)
        self._engine_gone()
        self._suspects.engine_died()

    def _engine_gone(self) -> None:
        self._arena.note_engine(0)
        self._engines.gone()
        self._settle()
        self._outbox.look_again()
