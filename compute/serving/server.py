"""The conversations with frontends: a thread that owns the sockets and never waits for anybody.

Invariants: every message but Join belongs to a session that holds its life connection; a session
that ends takes its jobs with it; a frontend that cannot be sent to has its session ended; every
Generate that was queued is answered by one Done, unless its session has ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from protocol.arena.attach import AttachRequest
from protocol.arena.fds import PeerCredentials
from protocol.errors import ConfigError, ProtocolError
from protocol.wire import messages as m
from protocol.wire.codec import CodecError, Envelope, decode
from protocol.wire.limits import ATTACH_MS
from protocol.wire.sockets import RuntimePaths

from .jobs import Job, JobQueue
from .life_socket import LifeSocket
from .post import Post
from .sessions import Session, Sessions
from .wishes import read_wishes

_LOG = logging.getLogger("headrace.compute")
_TICK_MS = 200


@dataclass(frozen=True, slots=True)
class Model:
    """What the server must know of the model."""

    fingerprint: bytes
    vocab_size: int
    context: int  # most tokens of a sequence, prompt included


class Server:
    """Binds compute's sockets in the runtime directory; `start` begins to serve.

    report   values for a StatusReport; called on the server's thread
    tiers    where every expert is, for a StatusReport that was asked for it; as well
    beat     called each time the loop comes round

    Raises ConfigError where a socket cannot be bound. The caller holds the lock.
    """

    def __init__(
        self,
        paths: RuntimePaths,
        model: Model,
        queue: JobQueue,
        report: Callable[[], m.Values],
        beat: Callable[[], None] = lambda: None,
        tiers: Callable[[], bytes] = bytes,
    ) -> None:
        self._paths = paths
        self._model = model
        self._queue = queue
        self._report = report
        self._beat = beat
        self._tiers = tiers
        self._generation = time.time_ns() // 1_000_000
        self._sessions = Sessions()
        self._outbox: deque[tuple[int, m.Message]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False  # set by a signal handler
        self._ended = False
        self._post = Post(paths.socket, self._generation)
        self._life = LifeSocket(paths.descriptor_socket, self._attach, self._gone)
        self._thread = threading.Thread(target=self._run, name="frontends", daemon=True)

    @property
    def n_sessions(self) -> int:
        """Frontends that have joined."""
        return len(self._sessions.by_number)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def send(self, session: int, message: m.Message) -> None:
        """Send a message to a session, soon; from any thread, without waiting."""
        self._outbox.append((session, message))
        self.wake()

    def wake(self) -> None:
        """Look at the queue and the outbox soon; safe in a signal handler."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._wake, 1)

    def stop_jobs(self) -> None:
        """Cancel all jobs and take no more; safe in a signal handler."""
        self._stopping = True
        self.wake()

    def close(self) -> None:
        """Send what is in the outbox and hang up on everybody."""
        self._ended = True
        self.wake()
        self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        while not self._ended:
            self._beat()
            self._wait()
            if self._stopping and not self._queue.is_closed:
                for job in self._queue.close():
                    self._told_end(job, "cancelled")
            for job in self._queue.remove_late():
                self._told_end(job, "deadline")
            self._tell_places()
            self._flush()
            self._send_outbox()
            self._life.tick()
            self._end_unattached()
        self._send_outbox()
        self._post.drain()
        self._life.close()
        self._post.close()

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(self._post.socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        for descriptor in self._life.descriptors():
            poller.register(descriptor, zmq.POLLIN)
        ready = dict(poller.poll(self._post.wait_ms(_TICK_MS)))
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        for source in ready:
            if isinstance(source, int) and source != self._wake:
                self._life.ready(source)
        if self._post.socket in ready:
            for route, frame in self._post.arrived():
                self._receive(route, frame)

    def _receive(self, route: bytes, frame: bytes) -> None:
        try:
            envelope = decode(frame)
        except CodecError as error:
            self._refuse(route, error.reason, str(error), error.request)
            return
        message = envelope.message
        if isinstance(message, m.Join):
            self._join(route, message)
            return
        session = self._sessions.by_route.get(route)
        number = int(getattr(message, "id", getattr(message, "request", 0)))
        objection = self._objection(session, envelope)
        if objection is not None:
            self._refuse(route, objection[0], objection[1], number)
            return
        assert session is not None
        self._dispatch(session, message)

    def _objection(self, session: Session | None, envelope: Envelope) -> tuple[str, str] | None:
        """Return (reason, text) where a message may not come now."""
        name = type(envelope.message).__name__
        if session is None:
            return ("hello_first", f"{name}: join first")
        if (envelope.session, envelope.generation) != (session.number, self._generation):
            return ("stale", f"{name} of session {envelope.session}: it has ended")
        if not session.is_attached:
            return ("hello_first", f"{name}: connect to the life socket first")
        return None

    def _dispatch(self, session: Session, message: Any) -> None:
        if isinstance(message, m.Generate):
            self._generate(session, message)
        elif isinstance(message, m.PromptPart):
            self._prompt_part(session, message)
        elif isinstance(message, m.CancelGenerate):
            session.parts.pop(message.id, None)
            for job in self._queue.cancel(session.number, message.id):
                self._told_end(job, "cancelled")
        elif isinstance(message, m.Status):
            tiers = self._tiers() if message.tiers else b""
            self._send(session, m.StatusReport(message.request, self._report(), tiers))
        elif isinstance(message, m.Ping):
            self._send(session, m.Pong(message.request))
        elif not isinstance(message, m.Pong):
            name = type(message).__name__
            number = int(getattr(message, "request", 0))
            self._refuse(session.route, "role", f"{name} is not for compute", number)

    # sessions

    def _join(self, route: bytes, join: m.Join) -> None:
        ours = m.PROTOCOL_VERSION
        if join.version[0] != ours[0]:
            found = ".".join(map(str, join.version))
            text = f"the frontend speaks version {found}, compute {ours[0]}.{ours[1]}"
            self._refuse(route, "version", text)
            return
        if join.fingerprint != self._model.fingerprint:
            text = (
                f"the frontend's model is {join.fingerprint.hex()}, "
                f"compute's {self._model.fingerprint.hex()}"
            )
            self._refuse(route, "fingerprint", text)
            return
        before = self._sessions.by_route.get(route)
        if before is not None:
            self._end(before)
        session = self._sessions.add(route, join.pid)
        if session is None:
            self._refuse(route, "limit", "too many frontends have joined")
            return
        joined = m.Joined(
            session=session.number,
            generation=self._generation,
            life_address=str(self._paths.descriptor_socket),
            context=self._model.context,
            max_waiting=self._queue.max_waiting,
        )
        self._send(session, joined)

    def _attach(self, request: AttachRequest, peer: PeerCredentials) -> None:
        session = self._sessions.by_number.get(request.session)
        if session is None or request.generation != self._generation:
            raise ProtocolError(f"no session {request.session} of generation {request.generation}")
        if peer.pid != session.pid or session.is_attached:
            raise ProtocolError(f"session {request.session} is not that of pid {peer.pid}")
        session.is_attached = True

    def _gone(self, number: int) -> None:
        session = self._sessions.by_number.get(number)
        if session is not None:
            self._end(session)

    def _end_unattached(self) -> None:
        latest = time.monotonic() - ATTACH_MS / 1000
        for session in list(self._sessions.by_number.values()):
            if not session.is_attached and session.joined < latest:
                self._end(session)

    def _end(self, session: Session) -> None:
        self._sessions.remove(session)
        self._life.hang_up(session.number)
        self._queue.cancel_session(session.number)

    # jobs

    def _prompt_part(self, session: Session, part: m.PromptPart) -> None:
        ids = session.parts.setdefault(part.id, [])
        ids += part.token_ids
        most = self._queue.max_waiting + 1
        too_many = len(session.parts) > most or session.n_part_ids > most * self._model.context
        if too_many or len(ids) > self._model.context:
            del session.parts[part.id]
            text = f"the prompt has more tokens than the context of {self._model.context}"
            self._refuse(session.route, "limit", text, part.id)

    def _generate(self, session: Session, message: m.Generate) -> None:
        prompt_ids = (*session.parts.pop(message.id, ()), *message.token_ids)
        objection = self._prompt_objection(prompt_ids)
        if objection is not None:
            self._refuse(session.route, *objection, message.id)
            return
        try:
            wishes = read_wishes(message, self._model.vocab_size)
        except ConfigError as error:
            self._refuse(session.route, "malformed", str(error), message.id)
            return
        seconds = message.deadline_ms / 1000
        ends_at = time.monotonic() + seconds if message.deadline_ms else None
        job = Job(session.number, message.id, prompt_ids, wishes, ends_at)
        if not self._queue.add(job):
            text = f"{self._queue.n_waiting} requests wait already"
            self._refuse(session.route, "busy", text, message.id, retry_ms=self._retry_ms())
            return
        self._send(session, m.Queued(job.id, job.position))

    def _prompt_objection(self, prompt_ids: tuple[int, ...]) -> tuple[str, str] | None:
        if not prompt_ids:
            return ("limit", "the prompt is empty")
        if len(prompt_ids) > self._model.context:
            text = f"the prompt has {len(prompt_ids)} tokens, the context {self._model.context}"
            return ("limit", text)
        if max(prompt_ids) >= self._model.vocab_size:
            text = f"id {max(prompt_ids)}, the vocabulary has {self._model.vocab_size}"
            return ("malformed", text)
        return None

    def _retry_ms(self) -> int:
        """How long a refused request had better wait: about a second for each one before it."""
        return 1000 * max(1, self._queue.n_waiting)

    def _tell_places(self) -> None:
        for job, place in self._queue.moved():
            self._tell(job.session, m.Queued(job.id, place))

    def _told_end(self, job: Job, reason: str) -> None:
        """A job that waited ends."""
        queue_ms = 1000 * (time.monotonic() - job.arrived)
        usage: m.Values = {"n_prompt": len(job.prompt_ids), "n_new": 0, "queue_ms": queue_ms}
        self._tell(job.session, m.Done(job.id, reason, usage))

    # sending

    def _flush(self) -> None:
        for route in self._post.flush():
            session = self._sessions.by_route.get(route)
            if session is not None:
                self._give_up(session)

    def _send_outbox(self) -> None:
        while self._outbox:
            self._tell(*self._outbox.popleft())

    def _tell(self, number: int, message: m.Message) -> None:
        session = self._sessions.by_number.get(number)
        if session is not None:
            self._send(session, message)

    def _send(self, session: Session, message: m.Message) -> None:
        if not self._post.send(session, message):
            self._give_up(session)

    def _give_up(self, session: Session) -> None:
        _LOG.warning("frontend of pid %d does not read: its session ends", session.pid)
        self._end(session)

    def _refuse(
        self, route: bytes, reason: str, text: str, request: int = 0, retry_ms: int = 0
    ) -> None:
        session = self._sessions.by_route.get(route)
        is_sent = self._post.refuse(
            route, session, reason, text, request=request, retry_ms=retry_ms
        )
        if not is_sent and session is not None:
            self._give_up(session)
