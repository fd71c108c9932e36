"""How a client asks for the arena's descriptor, and how its memory is mapped.

After Welcome a client connects to the descriptor socket, sends AttachRequest and receives the
descriptor. The connection stays open: its end is how each side learns that the other is gone.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time
from dataclasses import dataclass

from protocol.errors import DaemonLost, ProtocolError

from .fds import check_arena, is_writable, receive_descriptor
from .identity import Identity
from .layout import ArenaView
from .mapping import map_file

_REQUEST = struct.Struct("<4sQQ")
_MAGIC = b"HRA1"
ATTACH_REQUEST_BYTES = _REQUEST.size


@dataclass(frozen=True, slots=True)
class AttachRequest:
    """The one packet that a client sends on the descriptor socket."""

    session: int  # as in Welcome
    generation: int

    def pack(self) -> bytes:
        """The packet."""
        return _REQUEST.pack(_MAGIC, self.session, self.generation)

    @classmethod
    def unpack(cls, packet: bytes) -> AttachRequest:
        """What a packet says; raises ProtocolError on another."""
        if len(packet) != _REQUEST.size or packet[:4] != _MAGIC:
            raise ProtocolError(
                f"descriptor socket: found {packet[:24]!r}, wanted {_REQUEST.size} bytes {_MAGIC!r}"
            )
        _, session, generation = _REQUEST.unpack(packet)
        return cls(session, generation)


@dataclass(slots=True)
class Attached:
    """An open descriptor connection and the checked descriptor that came over it."""

    connection: socket.socket
    descriptor: int
    identity: Identity

    def close(self) -> None:
        """Close both."""
        self.connection.close()
        os.close(self.descriptor)


def attach(
    address: str, request: AttachRequest, *, n_bytes: int, arena_id: bytes, timeout_s: float
) -> Attached:
    """Connect, ask and check. Raises DaemonLost or ProtocolError; leaves nothing open then."""
    deadline = time.monotonic() + timeout_s
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    descriptor: int | None = None
    try:
        connection.settimeout(timeout_s)
        _connect(connection, address, request)
        left_s = max(deadline - time.monotonic(), 0.001)
        descriptor = _granted(address, *receive_descriptor(connection, timeout_s=left_s))
        identity = check_arena(descriptor, n_bytes=n_bytes, arena_id=arena_id)
        connection.setblocking(False)
    except BaseException:
        connection.close()
        if descriptor is not None:
            os.close(descriptor)
        raise
    return Attached(connection, descriptor, identity)


def _granted(address: str, descriptor: int | None, payload: bytes) -> int:
    if descriptor is None:
        # A daemon that began after our Welcome does not know the session: as good as lost.
        raise DaemonLost(f"{address}: refused: {payload.decode('utf-8', 'replace')}")
    return descriptor


def _connect(connection: socket.socket, address: str, request: AttachRequest) -> None:
    try:
        connection.connect(address)
        connection.send(request.pack(), socket.MSG_NOSIGNAL)
    except OSError as error:
        raise DaemonLost(f"descriptor socket {address}: {error}") from None


class MappedArena:
    """A mapping of the whole arena, read-only but, where asked, for the engine's pages.

    Invariants: no byte outside the engine's pages can be written through it. It holds a descriptor
    of its own until `close`, so the arena outlives its daemon; memory stays mapped as long as a
    view of it lives.
    """

    def __init__(self, descriptor: int, identity: Identity, *, engine: bool) -> None:
        layout = identity.layout
        if engine and not is_writable(descriptor):
            raise ProtocolError("arena descriptor: read-only, the engine needs its own pages")
        memory = map_file(descriptor, layout.n_bytes, writable=False)
        pages: mmap.mmap | None = None
        if engine:
            offset, n_bytes = layout.engine_pages
            prot = mmap.PROT_READ | mmap.PROT_WRITE
            pages = mmap.mmap(descriptor, n_bytes, mmap.MAP_SHARED, prot, offset=offset)
        self.descriptor = os.dup(descriptor)
        self.identity = identity
        self.view = ArenaView(memory, layout, pages)

    def close(self) -> None:
        """Let go of the mapping; it is unmapped once no view of it is left."""
        del self.view
        os.close(self.descriptor)
