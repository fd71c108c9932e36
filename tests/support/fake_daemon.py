"""A daemon for tests of clients: one thread, a small arena, no disk, honest answers.

An expert's bytes are `expert_bytes(layer, expert, piece)`, a row's `row_bytes(table, row)`. Answers
are replaced by `daemon.on[Kind] = function(daemon, session, message) -> list of messages`; None is
the honest answer. Sockets belong to its thread; `kill` ends it as SIGKILL would.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import zmq

from protocol.arena.attach import ATTACH_REQUEST_BYTES, AttachRequest
from protocol.arena.fds import (
    create_arena,
    peer_credentials,
    reopen_read_only,
    send_descriptor,
)
from protocol.arena.layout import (
    PIECES,
    ArenaLayout,
    ArenaView,
    Identity,
    SlotState,
    read_identity,
    write_identity,
)
from protocol.wire import messages as m
from protocol.wire.codec import Bounds, CodecError, decode, encode
from protocol.wire.records import KEY_RECORD
from protocol.wire.sockets import RuntimePaths, open_router

FINGERPRINT = b"fake-fingerprint"
LAYOUT = ArenaLayout.plan(
    n_layers=3,
    n_experts=8,
    n_slots_max=10,
    slot_bytes=4096,
    row_bytes=36,
    ring_rows=32,
    piece_offsets=(0, 1024, 1280, 2304, 2560, 3584),
    piece_bytes=(1000, 63, 1000, 63, 1000, 63),
)
Answers = list[Any] | None


def expert_bytes(layer: int, expert: int, piece: str) -> bytes:
    number = PIECES.index(piece)
    return bytes([(layer * 31 + expert * 7 + number) % 251]) * LAYOUT.piece_bytes[number]


def row_bytes(table: int, row: int) -> bytes:
    return bytes([(table * 101 + row) % 251]) * LAYOUT.row_bytes


@dataclass(slots=True)
class Session:
    number: int
    route: bytes
    hello: m.Hello
    connection: socket.socket | None = None
    leases: dict[int, int] = field(default_factory=dict)  # slot -> generation


class FakeDaemon:
    def __init__(self, runtime_dir: Path, arena: int | None = None, generation: int = 1) -> None:
        self.paths = RuntimePaths.within(runtime_dir)
        self.generation = generation
        self.on: dict[type, Callable[[FakeDaemon, Session, Any], Answers]] = {}
        self.on_attach: Callable[[FakeDaemon, Session, socket.socket], None] | None = None
        self.received: list[Any] = []
        self.n_refused_frames = 0
        self.sessions: dict[bytes, Session] = {}
        self.version = 1
        self.lease_quota = 4
        self.ring_position = 0
        self.silent = False
        self._next_session = 100 * generation
        self._queue: list[tuple[bytes, Any]] = []
        self._ending = ""
        self.arena = create_arena(LAYOUT.n_bytes) if arena is None else os.dup(arena)
        self.memory = mmap.mmap(self.arena, LAYOUT.n_bytes)
        if arena is None:
            first = Identity(LAYOUT, os.urandom(16), FINGERPRINT, generation, LAYOUT.n_slots_max)
            write_identity(self.memory, first)
        self.view = ArenaView(self.memory, LAYOUT)
        if arena is None:
            self.view.table[:] = -1
        self.arena_id = read_identity(self.memory).arena_id
        self._context = zmq.Context()
        self._wake_in, self._wake_out = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="fake-daemon", daemon=True)
        self._started = threading.Event()
        self._thread.start()
        if not self._started.wait(10):
            raise RuntimeError("fake daemon did not start")

    # From the test's thread.

    def kill(self) -> None:
        self._end("kill")

    def close(self) -> None:
        self._end("close")

    def _end(self, how: str) -> None:
        if not self._ending:
            self._ending = how
            self._wake_in.send(b"x")
            self._thread.join(10)
            assert not self._thread.is_alive()
            self._wake_in.close()
            self._wake_out.close()
            os.close(self.arena)

    def restart(self, *, keep_arena: bool = True) -> FakeDaemon:
        kept = os.dup(self.arena)
        self.kill()
        arena = kept if keep_arena else None
        successor = FakeDaemon(self.paths.socket.parent, arena, self.generation + 1)
        os.close(kept)
        return successor

    def push(self, message: Any, generation: int | None = None) -> None:
        """Send to every session, from the daemon's thread."""
        for session in list(self.sessions.values()):
            frame = message
            if not isinstance(message, bytes):
                frame = encode(message, session.number, generation or self.generation)
            self._queue.append((session.route, frame))
        self._wake_in.send(b"x")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # On the daemon's thread.

    def _run(self) -> None:
        router = open_router(self._context, self.paths.socket)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.paths.descriptor_socket.unlink(missing_ok=True)
        listener.bind(str(self.paths.descriptor_socket))
        listener.listen()
        self._started.set()
        try:
            while not self._ending:
                self._turn(router, listener)
        finally:
            router.close()
            listener.close()
            for session in self.sessions.values():
                if session.connection is not None:
                    session.connection.close()
            self._context.term()

    def _turn(self, router: Any, listener: socket.socket) -> None:
        poller = zmq.Poller()
        for each in (router, listener.fileno(), self._wake_out.fileno()):
            poller.register(each, zmq.POLLIN)
        connected = [s for s in self.sessions.values() if s.connection is not None]
        for session in connected:
            assert session.connection is not None
            poller.register(session.connection.fileno(), zmq.POLLIN)
        ready = dict(poller.poll(10_000))
        if router in ready:
            self._receive(router)
        if listener.fileno() in ready:
            self._accept(listener)
        for session in connected:
            if session.connection is not None and session.connection.fileno() in ready:
                self._forget(session)
        if self._wake_out.fileno() in ready:
            self._wake_out.recv(100)
        while self._queue:
            self._send(router, *self._queue.pop(0))

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.settimeout(2)
        request = AttachRequest.unpack(connection.recv(ATTACH_REQUEST_BYTES + 1))
        session = next((s for s in self.sessions.values() if s.number == request.session), None)
        if session is None or peer_credentials(connection).pid != session.hello.pid:
            connection.send(b"no such session")
            connection.close()
            return
        session.connection = connection
        if self.on_attach is not None:
            self.on_attach(self, session, connection)
            return
        descriptor = self.arena
        if session.hello.role == "reader":
            descriptor = reopen_read_only(self.arena)
        send_descriptor(connection, descriptor, b"arena")
        if descriptor != self.arena:
            os.close(descriptor)

    def _forget(self, session: Session) -> None:
        if session.connection is not None:
            session.connection.close()
            session.connection = None
        self.sessions.pop(session.route, None)

    def _receive(self, router: Any) -> None:
        route, frame = router.recv_multipart()
        try:
            envelope = decode(frame, Bounds(3, 8, 10, 2, LAYOUT.ring_rows))
        except CodecError as error:
            self.n_refused_frames += 1
            self._send(router, route, m.Refused("malformed", str(error), 0, 0, error.request))
            return
        message = envelope.message
        self.received.append(message)
        if self.silent:
            return
        if isinstance(message, m.Hello):
            self._answer_hello(router, route, message)
            return
        session = self.sessions.get(route)
        if session is None or envelope.session != session.number:
            self._send(router, route, m.Refused("hello_first", "no session", 0, 0))
            return
        for answer in self._answers(session, message):
            self._send(router, route, answer, session.number)

    def _answer_hello(self, router: Any, route: bytes, hello: m.Hello) -> None:
        self._next_session += 1
        session = Session(self._next_session, route, hello)
        answers = self._replaced(session, hello)
        if answers is None:
            self.sessions[route] = session
            answers = [self.welcome(session)]
        for answer in answers:
            self._send(router, route, answer, session.number)

    def _send(self, router: Any, route: bytes, message: Any, session: int = 0) -> None:
        frame = message
        if not isinstance(message, bytes):
            frame = encode(message, session, self.generation)
        with contextlib.suppress(zmq.Again, zmq.ZMQError):
            router.send_multipart([route, frame], zmq.NOBLOCK)

    def _replaced(self, session: Session, message: Any) -> Answers:
        replacement = self.on.get(type(message))
        return None if replacement is None else replacement(self, session, message)

    def _answers(self, session: Session, message: Any) -> list[Any]:
        answers = self._replaced(session, message)
        if answers is not None:
            return answers
        honest = getattr(self, f"on_{type(message).__name__.lower()}", None)
        return [] if honest is None else honest(session, message)

    # Honest answers.

    def welcome(self, session: Session) -> m.Welcome:
        return m.Welcome(
            session=session.number,
            generation=self.generation,
            arena_id=self.arena_id,
            arena_bytes=LAYOUT.n_bytes,
            n_layers=LAYOUT.n_layers,
            n_experts=LAYOUT.n_experts,
            n_slots=LAYOUT.n_slots_max,
            slot_bytes=LAYOUT.slot_bytes,
            max_experts=6,
            lease_quota=self.lease_quota,
            descriptor_address=str(self.paths.descriptor_socket),
            version=self.version,
            table=self.view.table.tobytes(),
            scores=bytes(4 * LAYOUT.n_slots_max),
        )

    def on_resync(self, session: Session, message: m.Resync) -> list[Any]:
        return [replace(self.welcome(session), request=message.request)]

    def on_bye(self, session: Session, _message: m.Bye) -> list[Any]:
        self._forget(session)
        return []

    def on_ping(self, _session: Session, message: m.Ping) -> list[Any]:
        return [m.Pong(message.request)]

    def on_stats(self, _session: Session, message: m.Stats) -> list[Any]:
        return [m.StatList(message.request, {"policy": "none", "n_received": len(self.received)})]

    def on_keys(self, _session: Session, message: m.Keys) -> list[Any]:
        layers, experts = np.nonzero(self.view.table >= 0)
        records = np.zeros(len(layers), KEY_RECORD)
        records["layer"], records["expert"] = layers, experts
        records["slot"] = self.view.table[layers, experts]
        return [m.KeyList(message.request, self.version, records.tobytes())]

    def load(self, layer: int, expert: int, taken: set[int]) -> int:
        """The slot that holds the expert, loaded where it must be, outside of `taken`."""
        slot = int(self.view.table[layer, expert])
        if slot >= 0:
            return slot
        slot = next(s for s in range(LAYOUT.n_slots_max) if s not in taken and not self._held(s))
        self.view.table[self.view.table == slot] = -1
        header = self.view.headers[slot]
        header["generation"] += 1
        header["layer"], header["expert"], header["state"] = layer, expert, SlotState.READY
        for piece in PIECES:
            self.view.piece(slot, piece)[:] = expert_bytes(layer, expert, piece)
        self.view.table[layer, expert] = slot
        return slot

    def _held(self, slot: int) -> bool:
        return any(slot in session.leases for session in self.sessions.values())

    def on_missrequest(self, _session: Session, message: m.MissRequest) -> list[Any]:
        before = self.view.table.copy()
        taken = set(message.busy)
        taken |= {int(before[message.layer, expert]) for expert in message.experts} - {-1}
        slots = []
        for expert in message.experts:
            slots.append(self.load(message.layer, expert, taken))
            taken.add(slots[-1])
        changed = np.argwhere(before != self.view.table)
        changes = tuple((int(la), int(ex), int(self.view.table[la, ex])) for la, ex in changed)
        self.version += bool(changes)
        return [
            m.SlotChanges(
                request=message.request,
                from_version=message.applied,
                to_version=self.version,
                slots=tuple(slots),
                changes=changes,
                errors=(),
                n_bytes=3189 * len(changes),
                read_ms=0.25,
                final=True,
            )
        ]

    def on_fetch(self, session: Session, message: m.Fetch) -> list[Any]:
        if len(session.leases) + len(message.keys) > self.lease_quota:
            return [m.Busy(message.request, 20)]
        leases = []
        for layer, expert in message.keys:
            slot = self.load(layer, expert, set())
            session.leases[slot] = int(self.view.headers[slot]["generation"])
            leases.append((layer, expert, slot, session.leases[slot]))
        return [m.Leased(message.request, tuple(leases), ())]

    def on_release(self, session: Session, message: m.Release) -> list[Any]:
        for slot, generation in message.leases:
            if session.leases.get(slot) == generation:
                del session.leases[slot]
        return []

    def on_rowrequest(self, _session: Session, message: m.RowRequest) -> list[Any]:
        rows = [
            (table, int(row))
            for table, numbers in ((message.table, message.rows), *message.others)
            for row in np.frombuffer(numbers, "<u4")
        ]
        if self.ring_position + len(rows) > LAYOUT.ring_rows:
            self.ring_position = 0
        position = self.ring_position
        for place, (table, row) in enumerate(rows):
            self.view.ring[position + place] = np.frombuffer(row_bytes(table, row), np.uint8)
        self.ring_position += len(rows)
        return [m.RowsReady(message.request, position, len(rows), ())]


def refuse(reason: str, text: str = "no", retry_ms: int = 0, pid: int = 0) -> Any:
    """An `on` function that refuses the message."""

    def answer(_daemon: FakeDaemon, _session: Session, message: Any) -> list[Any]:
        request = getattr(message, "request", 0)
        return [m.Refused(reason, text, retry_ms, pid, request)]

    return answer


def no_answer(_daemon: FakeDaemon, _session: Session, _message: Any) -> list[Any]:
    """An `on` function that leaves the message unanswered."""
    return []
