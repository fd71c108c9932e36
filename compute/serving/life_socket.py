"""The life socket: a frontend's open connection is its sign of life, and ours for it.

Runs on the server's thread. Invariants: a connection of another user is closed, one of another
process than the session's refused with words; one that says nothing for ATTACH_MS is closed;
nothing waits.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from protocol.arena.attach import ATTACH_REQUEST_BYTES, AttachRequest
from protocol.arena.fds import PeerCredentials, peer_credentials
from protocol.errors import ConfigError, ProtocolError
from protocol.wire.limits import ATTACH_MS

BACKLOG = 64
MAX_CONNECTIONS = 256
OK = b"ok"
_MAX_REASON = 200


@dataclass(slots=True)
class _Connection:
    socket: socket.socket
    peer: PeerCredentials
    accepted: float
    session: int = 0  # 0 until it said whose it is


class LifeSocket:
    """Listens on `path`.

    attach   says whether a peer may attach; raises ProtocolError where not
    gone     called with the session whose connection has ended
    """

    def __init__(
        self,
        path: Path,
        attach: Callable[[AttachRequest, PeerCredentials], None],
        gone: Callable[[int], None],
    ) -> None:
        self._path = path
        self._attach = attach
        self._gone = gone
        self._connections: dict[int, _Connection] = {}  # by file descriptor
        self._listener = _listen(path)

    def descriptors(self) -> Iterable[int]:
        """What to wait for: readable means `ready`."""
        return (self._listener.fileno(), *self._connections)

    def ready(self, descriptor: int) -> None:
        """See to a descriptor that is readable."""
        if descriptor == self._listener.fileno():
            self._accept()
        elif descriptor in self._connections:
            self._read(self._connections[descriptor])

    def tick(self) -> None:
        """Close what said nothing in time; call now and then."""
        latest = time.monotonic() - ATTACH_MS / 1000
        for connection in list(self._connections.values()):
            if connection.session == 0 and connection.accepted < latest:
                self._close(connection)

    def hang_up(self, session: int) -> None:
        """Close a session's connection, where it has one; `gone` is not called."""
        for connection in list(self._connections.values()):
            if connection.session == session:
                self._close(connection)

    def close(self) -> None:
        """Close everything; the lock is still held."""
        self._listener.close()
        self._path.unlink(missing_ok=True)
        for connection in list(self._connections.values()):
            self._close(connection)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:  # none there, or no descriptors left: the others are served on
            return
        peer = peer_credentials(accepted)
        if peer.uid != os.geteuid() or len(self._connections) >= MAX_CONNECTIONS:
            accepted.close()
            return
        accepted.setblocking(False)
        connection = _Connection(accepted, peer, time.monotonic())
        self._connections[accepted.fileno()] = connection

    def _read(self, connection: _Connection) -> None:
        try:
            packet = connection.socket.recv(ATTACH_REQUEST_BYTES + 1)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet or connection.session != 0:  # hung up, or a packet that nobody may send
            self._close(connection)
            if connection.session != 0:
                self._gone(connection.session)
            return
        try:
            request = AttachRequest.unpack(packet)
            self._attach(request, connection.peer)
            connection.session = request.session
            connection.socket.send(OK)
        except (ProtocolError, OSError) as error:
            self._refuse(connection, str(error))

    def _refuse(self, connection: _Connection, reason: str) -> None:
        with contextlib.suppress(OSError):
            connection.socket.send(reason.encode()[:_MAX_REASON])
        self._close(connection)
        if connection.session != 0:
            self._gone(connection.session)

    def _close(self, connection: _Connection) -> None:
        self._connections.pop(connection.socket.fileno(), None)
        connection.socket.close()


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    mask = os.umask(0o177)
    try:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"{path}: cannot be bound: {error.strerror}") from error
    finally:
        os.umask(mask)
    return listener
