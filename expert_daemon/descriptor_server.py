"""The descriptor socket: hands out the arena's descriptor, and tells when a client is gone.

A client connects, sends one AttachRequest and receives a descriptor: the engine the arena's own,
a reader one re-opened O_RDONLY. The connection then stays open and silent; its end is the client's.

Runs on the loop's thread. Invariants: a connection whose process is not of an allowed user, or that
is not attached ATTACH_MS after it began, is closed; no process has more than MAX_HALF_OPEN that are
not attached; nothing here waits.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from protocol.arena.attach import ATTACH_REQUEST_BYTES, AttachRequest
from protocol.arena.fds import PeerCredentials, peer_credentials, reopen_read_only, send_descriptor
from protocol.errors import ConfigError, ProtocolError
from protocol.open_files import descriptor_limit
from protocol.wire.limits import ATTACH_MS

from .log import ClientLog

BACKLOG = 128
MAX_CONNECTIONS = 1024
PART_OF_LIMIT = 4  # of the descriptors that the process may hold: ZeroMQ and the files take theirs
MAX_HALF_OPEN = 16  # of one process, not attached
MAX_ACCEPTS_AT_ONCE = 32  # then the loop's other work has its turn
ACCEPT_PAUSE_S = 0.1


@dataclass(slots=True)
class Connection:
    """One accepted connection; `session` is 0 until it is attached."""

    socket: socket.socket
    peer: PeerCredentials
    session: int
    timer: asyncio.TimerHandle | None


@dataclass(frozen=True, slots=True)
class Grant:
    """What `attach` allows: the session's number and whether it gets the writable descriptor."""

    session: int
    engine: bool


class DescriptorServer:
    """Listens on `path`; calls `attach` when a client asks and `gone` when its connection ends."""

    def __init__(
        self,
        path: Path,
        descriptor: int,
        *,
        loop: asyncio.AbstractEventLoop,
        allowed_uids: frozenset[int],
        attach: Callable[[AttachRequest, PeerCredentials], Grant],
        gone: Callable[[int], None],
        clients: ClientLog,
    ) -> None:
        """Bind and listen; `attach` raises ProtocolError to refuse. Raises ConfigError."""
        self._loop = loop
        self._writable = descriptor
        self._read_only = reopen_read_only(descriptor)
        self._allowed_uids = allowed_uids
        self._attach = attach
        self._gone = gone
        self._clients = clients
        self._connections: dict[int, Connection] = {}  # by file descriptor
        self._by_session: dict[int, Connection] = {}
        # By pid and file descriptor, the oldest first.
        self._half_open: defaultdict[int, dict[int, Connection]] = defaultdict(dict)
        self._most = min(MAX_CONNECTIONS, descriptor_limit() // PART_OF_LIMIT)
        self._path = path
        self._listener = _listen(path)
        loop.add_reader(self._listener, self._accept)

    def hang_up(self, session: int) -> None:
        """Close a session's connection, where it has one; `gone` is not called."""
        connection = self._by_session.pop(session, None)
        if connection is not None:
            self._close(connection)

    def close(self) -> None:
        """Close the listener and every connection; the lock is still held."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self._path.unlink(missing_ok=True)
        for connection in list(self._connections.values()):
            self._close(connection)
        os.close(self._read_only)

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTS_AT_ONCE):  # readable still: called again
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors left: the others are still served
                text = f"descriptor socket: a connection was not accepted: {error.strerror}"
                self._clients.note(text)
                self._loop.remove_reader(self._listener)
                self._loop.call_later(ACCEPT_PAUSE_S, self._listen_again)
                return
            self._begin(accepted, peer_credentials(accepted))

    def _begin(self, accepted: socket.socket, peer: PeerCredentials) -> None:
        is_allowed = peer.uid in self._allowed_uids
        if is_allowed:
            self._make_room(peer.pid)
        if not is_allowed or len(self._connections) >= self._most:
            self._clients.note(f"descriptor socket: pid {peer.pid} of user {peer.uid} refused")
            accepted.close()
            return
        accepted.setblocking(False)
        connection = Connection(accepted, peer, 0, None)
        connection.timer = self._loop.call_later(ATTACH_MS / 1e3, self._too_late, connection)
        self._connections[accepted.fileno()] = connection
        self._half_open[peer.pid][accepted.fileno()] = connection
        self._loop.add_reader(accepted, self._readable, connection)

    def _make_room(self, pid: int) -> None:
        """Close a process's oldest half-open connection where it has as many as it may."""
        half_open = self._half_open.get(pid, {})
        if len(half_open) < MAX_HALF_OPEN:
            return
        oldest = next(iter(half_open.values()))
        self._readable(oldest)  # what it asked for may lie there
        if oldest.session == 0:
            self._close(oldest)

    def _listen_again(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _too_late(self, connection: Connection) -> None:
        connection.timer = None
        self._close(connection)

    def _readable(self, connection: Connection) -> None:
        try:
            packet = connection.socket.recv(ATTACH_REQUEST_BYTES + 1)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if packet and connection.session == 0:
            self._answer(connection, packet)
        else:  # hung up, or a second packet, which is none of the protocol
            self._end(connection)

    def _answer(self, connection: Connection, packet: bytes) -> None:
        try:
            grant = self._attach(AttachRequest.unpack(packet), connection.peer)
        except ProtocolError as error:
            self._refuse(connection, str(error))
            return
        if connection.timer is not None:
            connection.timer.cancel()
            connection.timer = None
        self._no_longer_half_open(connection)
        connection.session = grant.session
        self._by_session[grant.session] = connection
        descriptor = self._writable if grant.engine else self._read_only
        try:
            send_descriptor(connection.socket, descriptor, b"arena")
        except OSError:
            self._end(connection)

    def _refuse(self, connection: Connection, text: str) -> None:
        try:
            connection.socket.send(text.encode()[:250], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError as error:
            who = f"descriptor socket: pid {connection.peer.pid}"
            self._clients.note(f"{who}: {error.strerror}")
        self._close(connection)

    def _end(self, connection: Connection) -> None:
        self._close(connection)
        if self._by_session.get(connection.session) is connection:
            del self._by_session[connection.session]
            self._gone(connection.session)

    def _close(self, connection: Connection) -> None:
        if connection.timer is not None:
            connection.timer.cancel()
            connection.timer = None
        number = connection.socket.fileno()
        if self._connections.pop(number, None) is not None:
            self._no_longer_half_open(connection)
            self._loop.remove_reader(number)
            connection.socket.close()

    def _no_longer_half_open(self, connection: Connection) -> None:
        pid = connection.peer.pid
        half_open = self._half_open.get(pid, {})
        half_open.pop(connection.socket.fileno(), None)
        if not half_open:
            self._half_open.pop(pid, None)


def _listen(path: Path) -> socket.socket:
    """Return a listening socket; the caller holds the lock, so a file left there is stale."""
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
