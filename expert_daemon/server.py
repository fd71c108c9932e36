"""The daemon's conversations: which message may come when, and who sees to it.

Runs on the loop's thread, as does everything that it calls. Invariants: every message but Hello
belongs to a session of this generation that holds its descriptor connection; whatever a client
sends, the others are served on.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from protocol.wire import messages
from protocol.wire.codec import Bounds, CodecError, Envelope, decode
from protocol.wire.messages import Hello, Message, Refused

from .admission import Admission
from .advice_desk import AdviceDesk
from .config import DaemonConfig
from .descriptor_server import DescriptorServer
from .engine_desk import EngineDesk
from .fault_desk import FaultDesk
from .fetch_desk import FetchDesk
from .liveness import Liveness
from .loading import SLOW_READ_NS
from .log import ClientLog
from .outbox import Outbox
from .outcome import RequestRefused
from .reports import Reports
from .resize_desk import ResizeDesk
from .router import Router
from .row_desk import RowDesk
from .sessions import Session, Sessions
from .trace_desk import TraceDesk
from .works import Works

TICK_S = 0.5

Handler = Callable[[Session, Any], None]


@dataclass(frozen=True, slots=True)
class Rule:
    """Who sees to a kind of message, and whose it may be."""

    handle: Handler
    role: str = ""  # the only role that may send it; empty: any
    needs_attach: bool = True


class Server:
    """Binds both sockets in the runtime directory and answers until `close`."""

    def __init__(self, config: DaemonConfig, loop: asyncio.AbstractEventLoop, works: Works) -> None:
        """Begin to listen; raises ConfigError where a socket cannot be bound."""
        self._loop = loop
        self._works = works
        self._generation = works.arena.identity.daemon_generation
        self._bounds = _bounds(works)
        sessions = self._sessions = Sessions()
        self._router = Router(config.socket_path, loop, self._receive, self._lose_route)
        clients = ClientLog()
        outbox = self._outbox = Outbox(
            self._router, self._generation, works.counters, self._lose, clients
        )
        self._engines = EngineDesk(sessions, outbox, works)
        self._fetches = FetchDesk(sessions, outbox, works, loop, self.settle)
        self._rows = RowDesk(sessions, outbox, works)
        self._advice = AdviceDesk(outbox, works, loop, self.settle)
        self._resizes = ResizeDesk(
            sessions, outbox, works, self._advice, loop, self.settle, clients
        )
        self._traces = TraceDesk(sessions, outbox, works.tracing, loop, clients)
        self._reports = Reports(sessions, outbox, works, self._advice)
        self._fault_desk = FaultDesk(outbox, works)
        self._liveness = Liveness(sessions, outbox, clients)
        self._admission = Admission(
            sessions,
            outbox,
            works,
            loop,
            engines=self._engines,
            fetches=self._fetches,
            hang_up=self._hang_up,
            settle=self.settle,
            clients=clients,
        )
        self._rules = self._make_rules()
        self._descriptors = DescriptorServer(
            config.descriptor_path,
            works.arena.descriptor,
            loop=loop,
            allowed_uids=frozenset({os.geteuid(), *config.allowed_uids}),
            attach=self._admission.attach,
            gone=self._admission.disconnected,
            clients=clients,
        )
        self._next_tick = loop.call_later(TICK_S, self._tick)

    def take_reads(self) -> None:
        """Readers have finished something: call on the loop's thread."""
        self._works.loading.take_results()
        self.settle()
        self._outbox.look_again()

    def settle(self) -> None:
        """Start the reads and send the answers that have fallen due."""
        answers, fetches = self._works.loading.settle()
        for answer in answers:
            self._engines.answer(answer)
        for fetch in fetches:
            self._fetches.answer(fetch)
        self._rows.send_ready()
        self._engines.push_changes()
        self._resizes.advance()
        self._advice.advance()

    def stop_receiving(self) -> None:
        """Take no further message; answers still go out."""
        self._router.stop_receiving()

    def close(self) -> None:
        """Hang up on everybody."""
        self._next_tick.cancel()
        self._admission.watch.end()
        self._descriptors.close()
        self._router.close()

    def _make_rules(self) -> dict[type[Any], Rule]:
        engines, fetches, rows = self._engines, self._fetches, self._rows
        return {
            messages.MissRequest: Rule(engines.miss, "engine"),
            messages.Ack: Rule(self._ack, "engine"),
            messages.Touch: Rule(engines.touch, "engine"),
            messages.Resync: Rule(engines.resync, "engine"),
            messages.Cancel: Rule(self._cancel),
            messages.Fetch: Rule(fetches.fetch, "reader"),
            messages.Release: Rule(fetches.release, "reader"),
            messages.RowRequest: Rule(rows.request),
            messages.RowsDone: Rule(rows.done),
            messages.Keys: Rule(self._reports.keys, needs_attach=False),
            messages.Stats: Rule(self._reports.stats, needs_attach=False),
            messages.Ping: Rule(self._reports.ping, needs_attach=False),
            messages.Bye: Rule(self._admission.bye, needs_attach=False),
            messages.Stream: Rule(engines.stream, "engine"),
            messages.Consumed: Rule(engines.consumed, "engine"),
            messages.Resize: Rule(self._resizes.resize),
            messages.Unquarantine: Rule(self._fault_desk.unquarantine),
            messages.Trace: Rule(self._traces.trace),
            messages.Hint: Rule(self._advice.hint, "engine"),
            messages.Dropped: Rule(self._resizes.dropped, "engine"),
            messages.Warm: Rule(self._advice.warm),
            messages.Pong: Rule(_pass_over),
        }

    def _tick(self) -> None:
        """See to what only the passing of time brings about."""
        self._next_tick = self._loop.call_later(TICK_S, self._tick)
        self._works.threads.relieve(SLOW_READ_NS)
        self._works.rows.threads.relieve(SLOW_READ_NS)
        self._works.loading.look_for_slow_reads()
        self._liveness.look()
        self.settle()
        self._outbox.look_again()

    def _receive(self, route: bytes, frames: list[bytes]) -> None:
        if len(frames) != 1:
            text = f"a message of {len(frames)} frames, wanted 1"
            self._outbox.refuse(route, Refused("malformed", text, 0, 0))
            return
        try:
            envelope = decode(frames[0], self._bounds)
        except CodecError as error:
            refusal = Refused(error.reason, str(error), 0, 0, error.request)
            self._outbox.refuse(route, refusal)
            return
        if isinstance(envelope.message, Hello):
            self._admission.hello(route, envelope.message)
        else:
            self._dispatch(route, envelope)
        self.settle()

    def _dispatch(self, route: bytes, envelope: Envelope) -> None:
        message = envelope.message
        request = int(getattr(message, "request", 0))
        session = self._sessions.by_route.get(route)
        rule = self._rules.get(type(message))
        objection = self._objection(session, envelope, rule)
        if session is not None:
            self._liveness.heard(session)
        if objection is None:
            assert session is not None
            assert rule is not None
            try:
                rule.handle(session, message)
            except RequestRefused as refused:
                objection = (refused.reason, str(refused))
        if objection is not None:
            refusal = Refused(objection[0], objection[1], 0, 0, request)
            self._outbox.refuse(route, refusal, session)

    def _objection(
        self, session: Session | None, envelope: Envelope, rule: Rule | None
    ) -> tuple[str, str] | None:
        """Return (reason, text) where the message may not come now."""
        if session is not None and rule is not None:
            is_known = envelope[1:] == (session.number, self._generation)
            may_come = session.is_attached or not rule.needs_attach
            if is_known and may_come and rule.role in ("", session.role):
                return None
        name = type(envelope.message).__name__
        found = f"{name} of session {envelope.session}, generation {envelope.generation}"
        if envelope.generation not in (0, self._generation):
            return ("stale", f"{found}: this daemon is generation {self._generation}")
        if session is None or envelope.generation == 0:
            return ("hello_first", f"{found}: say Hello first")
        if envelope.session != session.number:
            return ("stale", f"{found}: this client's session is {session.number}")
        if rule is None:
            return ("role", f"{name} is not for the daemon")
        if rule.role and session.role != rule.role:
            return ("role", f"{name} may come from an {rule.role} only, not a {session.role}")
        if rule.needs_attach and not session.is_attached:
            return ("hello_first", f"{found}: attach to the descriptor socket first")
        return None

    def _cancel(self, session: Session, message: messages.Cancel) -> None:
        if self._rows.cancel(session, message.request) or self._resizes.cancel(session, message):
            return
        if session.role == "engine":
            self._engines.cancel(session, message)
        else:
            self._fetches.cancel(session, message)

    def _ack(self, session: Session, message: messages.Ack) -> None:
        self._engines.ack(session, message)
        self._resizes.acked(session, message)

    def _hang_up(self, session: int) -> None:
        self._descriptors.hang_up(session)

    def _lose_route(self, route: bytes) -> None:
        """Drop a client whose frames wait in vain; its session may have ended before."""
        session = self._sessions.by_route.get(route)
        if session is not None:
            self._outbox.drop(session)

    def _lose(self, session: Session) -> None:
        """Drop a client that cannot be sent to, after what is being sent now."""
        self._loop.call_soon(self._admission.disconnected, session.number)


def _bounds(works: Works) -> Bounds:
    layout = works.arena.view.layout
    return Bounds(
        n_layers=layout.n_layers,
        n_experts=layout.n_experts,
        n_slots=layout.n_slots_max,  # those of one that was given up may still be named
        n_tables=len(works.rows.tables),
        ring_rows=layout.ring_rows,
    )


def _pass_over(_session: Session, _message: Message) -> None:
    """Advice that this version does not take."""
