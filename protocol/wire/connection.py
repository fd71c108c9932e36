"""One session with the daemon: the ZeroMQ socket, the descriptor connection, the way in and out.

Invariants: every wait has a deadline; once `lost` says why, nothing is sent or received any more.
One thread at a time. A connection is never mended: a new one says Hello again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import zmq

from protocol.arena.attach import Attached
from protocol.errors import DaemonLost, ProtocolError

from .codec import Bounds, CodecError, decode, encode
from .limits import BYE_MS
from .messages import Bye, Message, Refused, Welcome

if TYPE_CHECKING:
    from pathlib import Path

    from .sockets import Socket

# A wait on the ZeroMQ socket alone is the fastest; this often it looks whether the daemon lives.
SLICE_MS = 20
_NOBLOCK = int(zmq.NOBLOCK)
_RCVMORE = int(zmq.RCVMORE)


class Deadline:
    """A point in time."""

    __slots__ = ("_end", "total_ms")

    def __init__(self, milliseconds: float) -> None:
        self.total_ms = milliseconds
        self._end = time.monotonic() + milliseconds / 1000

    @property
    def left_ms(self) -> int:
        """Milliseconds left, rounded up, 0 when it has passed."""
        return max(0, int((self._end - time.monotonic()) * 1000 + 0.999))

    @property
    def passed_ms(self) -> float:
        """Milliseconds since it was set."""
        return self.total_ms - (self._end - time.monotonic()) * 1000


@dataclass(frozen=True, slots=True)
class Ends:
    """What a Welcome and the descriptor's arrival leave behind."""

    welcome: Welcome
    attached: Attached


class Connection:
    """A session that is open, or was. Made by greeting.open_connection."""

    def __init__(self, dealer: Socket, path: Path, ends: Ends) -> None:
        self.lost = ""  # why, once it is
        self.welcome = ends.welcome
        self.attached = ends.attached
        self.n_passed_over = 0  # messages of ended sessions
        self.spins = False  # whether a wait looks again and again instead of sleeping
        self._path = path
        self._dealer = dealer
        dealer.setsockopt(zmq.RCVTIMEO, SLICE_MS)
        layout = ends.attached.identity.layout
        self.bounds = Bounds(
            n_layers=ends.welcome.n_layers,
            n_experts=ends.welcome.n_experts,
            n_slots=layout.n_slots_max,  # a resize may bring all of them into use
            ring_rows=layout.ring_rows,
        )
        self._poller = zmq.Poller()
        self._poller.register(dealer, zmq.POLLIN)
        self._poller.register(ends.attached.connection.fileno(), zmq.POLLIN)

    def send(self, message: Message, *, wait_ms: int = 1000) -> None:
        """Send one message; raises DaemonLost where the daemon takes none within wait_ms."""
        self.check()
        frame = encode(message, self.welcome.session, self.welcome.generation)
        try:
            self._dealer.send(frame, _NOBLOCK)
        except zmq.Again:
            if wait_ms == 0 or not self._dealer.poll(wait_ms, zmq.POLLOUT):
                self.lose(f"took no message within {wait_ms} ms")
            self._dealer.send(frame, zmq.NOBLOCK)

    def send_if_possible(self, message: Message) -> bool:
        """Send a message whose loss costs nothing; True where it went out."""
        if self.lost:
            return False
        frame = encode(message, self.welcome.session, self.welcome.generation)
        try:
            self._dealer.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, deadline: Deadline) -> Message | None:
        """The next message, or None at the deadline; raises DaemonLost when the daemon is gone.

        What it sent just before may be lost with it. A frame that cannot be read ends the session:
        it may have been the answer that closes a window.
        """
        self.check()
        while True:
            left_ms = deadline.left_ms
            if self.spins:
                frame = self._spun_frame(min(left_ms, SLICE_MS))
            else:
                frame = self._next_frame() if left_ms > SLICE_MS else self._polled_frame(left_ms)
            message = self._read(frame) if frame is not None else None
            if message is not None or deadline.left_ms == 0:
                return message

    def _next_frame(self) -> bytes | None:
        """What comes within SLICE_MS."""
        try:
            return self._take_frame(0)
        except zmq.Again:
            return self._polled_frame(0)

    def _spun_frame(self, wait_ms: int) -> bytes | None:
        """What comes within wait_ms, looked for without a pause; other threads may run between two
        looks.
        """
        end = time.monotonic() + wait_ms / 1000
        frame = self._polled_frame(0)
        while frame is None and time.monotonic() < end:
            frame = self._polled_frame(0)
        return frame

    def _polled_frame(self, wait_ms: int) -> bytes | None:
        """What comes within wait_ms, unless the daemon is gone."""
        ready = dict(self._poller.poll(wait_ms))
        if self._dealer in ready:
            try:
                return self._take_frame(_NOBLOCK)
            except zmq.Again:
                return None
        if ready:
            self._read_descriptor_connection()
        return None

    def _take_frame(self, flags: int) -> bytes:
        """The next message's frame; b"" stands for several, which nothing here can read."""
        frame = self._dealer.recv(flags)
        if self._dealer.get(_RCVMORE):
            while self._dealer.get(_RCVMORE):
                self._dealer.recv(_NOBLOCK)
            return b""
        return frame

    def _read(self, frame: bytes) -> Message | None:
        """The message in a frame; None where it belongs to an ended session."""
        try:
            envelope = decode(frame, self.bounds)
        except CodecError as error:
            self.end(f"sent what cannot be read: {error}")
            raise
        if isinstance(envelope.message, Welcome | Refused):
            return envelope.message
        if envelope.generation != self.welcome.generation:
            self.lose(
                f"is of generation {envelope.generation}, this session of {self.welcome.generation}"
            )
        if envelope.session != self.welcome.session:
            self.n_passed_over += 1
            return None
        return envelope.message

    def _read_descriptor_connection(self) -> None:
        try:
            packet = self.attached.connection.recv(64)
        except BlockingIOError:
            return
        except OSError as error:
            self.lose(f"is gone: {error.strerror}")
        if not packet:
            self.lose("is gone: it closed the descriptor connection")
        self.lose(f"sent {len(packet)} bytes on the descriptor connection, wanted none")

    def replace_welcome(self, welcome: Welcome) -> None:
        """Take the Welcome that answers a Resync; raises DaemonLost on another session's."""
        if (welcome.session, welcome.generation) != (
            self.welcome.session,
            self.welcome.generation,
        ):
            self.lose(f"answered Resync for session {welcome.session}, not {self.welcome.session}")
        check_agreement(welcome, self.attached)
        self.welcome = welcome

    def check(self) -> None:
        """Raise DaemonLost when the session has ended."""
        if self.lost:
            raise DaemonLost(f"{self._path}: the daemon {self.lost}")

    def lose(self, why: str) -> NoReturn:
        """End the session and raise DaemonLost."""
        self.end(why)
        raise DaemonLost(f"{self._path}: the daemon {why}")

    def close(self) -> None:
        """Say Bye, wait a moment for the daemon to hang up, and close."""
        if not self.lost:
            if self.send_if_possible(Bye()):
                self._wait_for_the_end(Deadline(BYE_MS))
            self.end("was told Bye")

    def _wait_for_the_end(self, deadline: Deadline) -> None:
        # LINGER 0 would drop a Bye that is still on its way.
        poller = zmq.Poller()
        poller.register(self.attached.connection.fileno(), zmq.POLLIN)
        poller.poll(deadline.left_ms)

    def end(self, why: str) -> None:
        """Close everything and remember why; the daemon sees the descriptor connection end."""
        if not self.lost:
            self.lost = why
            self._dealer.close()
            self.attached.close()


def check_agreement(welcome: Welcome, attached: Attached) -> None:
    """Raise ProtocolError where Welcome and the arena's identity page differ."""
    identity = attached.identity
    layout = identity.layout
    for name, told, found in (
        ("n_layers", welcome.n_layers, layout.n_layers),
        ("n_experts", welcome.n_experts, layout.n_experts),
        ("slot_bytes", welcome.slot_bytes, layout.slot_bytes),
        ("arena_id", welcome.arena_id, identity.arena_id),
    ):
        if told != found:
            raise ProtocolError(f"Welcome says {name} {told!r}, the arena's page {found!r}")
    if welcome.n_slots > layout.n_slots_max:
        raise ProtocolError(
            f"Welcome says {welcome.n_slots} slots, the arena has room for {layout.n_slots_max}"
        )
