"""The arena's descriptor: making it, sealing it, handing it over, checking what was handed over.

Descriptors travel over SOCK_SEQPACKET with SCM_RIGHTS, exactly one a message, close-on-exec on both
sides. Whoever receives one checks seals, size and identity page before it maps anything.

The engine receives the read-write descriptor: it maps the whole arena read-only and only its own
pages writable, and it keeps the descriptor so that an arena outlives its daemon. Readers receive
one re-opened O_RDONLY, from which no writable mapping can be made.
"""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import socket
import struct
import time
from dataclasses import dataclass

from protocol.errors import ConfigError, DaemonLost, ProtocolError

from .identity import Identity, read_identity
from .rooms import PAGE_BYTES

_PEER_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_WANTED_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, which Python 3.11 does not name
_FORBIDDEN_SEALS = fcntl.F_SEAL_WRITE | _FUTURE_WRITE
_MOST_DESCRIPTORS = 8  # room for more than one, so that more than one is seen and closed


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """Who is at the other end of a Unix socket, as the kernel says."""

    pid: int
    uid: int
    gid: int


def create_arena(n_bytes: int, name: str = "headrace-arena") -> int:
    """A new descriptor of a sparse, zeroed file of memory, sealed against another size.

    Never F_SEAL_FUTURE_WRITE: a restarted daemon could not write.
    """
    if n_bytes <= 0 or n_bytes % PAGE_BYTES:
        raise ConfigError(f"arena: {n_bytes} bytes, wanted a positive multiple of {PAGE_BYTES}")
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, n_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _WANTED_SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def reopen_read_only(descriptor: int) -> int:
    """A new descriptor of the same file that can only be read."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def is_writable(descriptor: int) -> bool:
    """Whether the descriptor was opened for writing."""
    return fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR


def check_arena(descriptor: int, *, n_bytes: int | None = None, arena_id: bytes = b"") -> Identity:
    """The identity of the arena behind a descriptor, all checked; raises ProtocolError.

    n_bytes   the size it was announced with, where it was
    arena_id  the id it was announced with, where it was
    """
    check_sealed(descriptor)
    size = os.fstat(descriptor).st_size
    if n_bytes is not None and size != n_bytes:
        raise ProtocolError(f"arena descriptor: the file has {size} bytes, announced {n_bytes}")
    if size < PAGE_BYTES:
        raise ProtocolError(f"arena descriptor: the file has {size} bytes, less than a page")
    with mmap.mmap(descriptor, PAGE_BYTES, mmap.MAP_SHARED, mmap.PROT_READ) as page:
        identity = read_identity(page)
    if identity.layout.n_bytes > size:
        raise ProtocolError(
            f"arena descriptor: the file has {size} bytes, its layout {identity.layout.n_bytes}"
        )
    if arena_id and identity.arena_id != arena_id:
        raise ProtocolError(
            f"arena descriptor: arena {identity.arena_id.hex()}, announced {arena_id.hex()}"
        )
    return identity


def check_sealed(descriptor: int) -> None:
    """Raise ProtocolError unless it is sealed memory that nobody can shrink or grow."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolError(f"arena descriptor: no sealed memory ({error.strerror})") from None
    if seals & _WANTED_SEALS != _WANTED_SEALS or seals & _FORBIDDEN_SEALS:
        raise ProtocolError(
            f"arena descriptor: seals {seals:#x}, wanted {_WANTED_SEALS:#x} (shrink, grow) "
            f"and none of {_FORBIDDEN_SEALS:#x} (write)"
        )


def peer_credentials(connection: socket.socket) -> PeerCredentials:
    """Pid, uid and gid of the process that opened the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    return PeerCredentials(*_PEER_CREDENTIALS.unpack(raw))


def send_descriptor(connection: socket.socket, descriptor: int, payload: bytes) -> None:
    """Send one descriptor with a payload of at least one byte, in one packet, never waiting.

    Raises BlockingIOError where the peer's buffer is full, OSError where it is gone.
    """
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
    connection.sendmsg([payload], ancillary, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def receive_descriptor(
    connection: socket.socket, *, timeout_s: float, max_payload: int = 256
) -> tuple[int | None, bytes]:
    """(descriptor, payload) of the next packet; the descriptor is None where none came with it.

    Raises DaemonLost where nothing came in time or the peer hung up, ProtocolError where more than
    one descriptor or more payload came; such descriptors are closed.
    """
    deadline = time.monotonic() + timeout_s
    room = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)
    while True:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            payload, ancillary, flags, _ = connection.recvmsg(
                max_payload, room, socket.MSG_CMSG_CLOEXEC
            )
            break
        except TimeoutError:
            raise DaemonLost(f"descriptor socket: no answer in {timeout_s:g} s") from None
        except InterruptedError:
            continue
        except ConnectionError as error:
            raise DaemonLost(f"descriptor socket: {error.strerror}") from None
    descriptors = _descriptors(ancillary)
    truncated = flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC)
    if truncated or len(descriptors) > 1:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ProtocolError(
            f"descriptor socket: {len(descriptors)} descriptors"
            f"{' and a packet cut short' if truncated else ''}, wanted one"
        )
    if not payload and not descriptors:
        raise DaemonLost("descriptor socket: the daemon hung up")
    return (descriptors[0] if descriptors else None), payload


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return list(descriptors)
