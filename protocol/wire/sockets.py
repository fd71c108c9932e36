"""ZeroMQ sockets as both sides must make them, and where their files stand.

No ROUTING_ID is ever set: a duplicate would never be served. IMMEDIATE keeps messages for a dead
daemon from reaching its successor; LINGER 0 lets a process end.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from protocol.errors import ConfigError

from .limits import (
    HANDSHAKE_MS,
    MAX_MESSAGE_BYTES,
    MAX_PATH_BYTES,
    RECEIVE_HIGH_WATER,
    SEND_HIGH_WATER,
)

if TYPE_CHECKING:
    Context = zmq.Context[zmq.Socket[bytes]]
    Socket = zmq.Socket[bytes]

LOCK_NAME = "expertd.lock"
SOCKET_NAME = "expertd.sock"
DESCRIPTOR_SOCKET_NAME = "arena.sock"
COMPUTE_LOCK_NAME = "compute.lock"
COMPUTE_SOCKET_NAME = "compute.sock"
COMPUTE_LIFE_NAME = "compute.life"
_RECONNECT_MS = 20


@dataclass(frozen=True, slots=True)
class RuntimePaths:
    """A service's files in a runtime directory."""

    lock: Path  # taken before anything is bound, never unlinked
    socket: Path  # ZeroMQ ipc
    descriptor_socket: Path  # SOCK_SEQPACKET; compute's is the life socket

    @classmethod
    def within(cls, directory: str | os.PathLike[str]) -> RuntimePaths:
        """The daemon's; raises ConfigError where one is too long for a socket."""
        return cls._checked(directory, LOCK_NAME, SOCKET_NAME, DESCRIPTOR_SOCKET_NAME)

    @classmethod
    def of_compute(cls, directory: str | os.PathLike[str]) -> RuntimePaths:
        """Compute's; raises ConfigError where one is too long for a socket."""
        return cls._checked(directory, COMPUTE_LOCK_NAME, COMPUTE_SOCKET_NAME, COMPUTE_LIFE_NAME)

    @classmethod
    def _checked(cls, directory: str | os.PathLike[str], *names: str) -> RuntimePaths:
        base = Path(directory).absolute()
        paths = cls(*(base / name for name in names))
        for path in (paths.socket, paths.descriptor_socket):
            n_bytes = len(os.fsencode(path))
            if n_bytes > MAX_PATH_BYTES:
                raise ConfigError(
                    f"{path}: the socket's path has {n_bytes} bytes, wanted at most "
                    f"{MAX_PATH_BYTES}; choose a shorter runtime directory"
                )
        return paths


def open_dealer(context: Context, path: Path) -> Socket:
    """A client's socket, connecting to the service's path in the background."""
    dealer = context.socket(zmq.DEALER)
    _set_common(dealer)
    dealer.setsockopt(zmq.IMMEDIATE, 1)
    dealer.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    dealer.connect(f"ipc://{path}")
    return dealer


def open_router(context: Context, path: Path) -> Socket:
    """A service's socket, bound and only for its owner's eyes. The lock must be held."""
    router = context.socket(zmq.ROUTER)
    _set_common(router)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    try:
        router.bind(f"ipc://{path}")
        path.chmod(0o600)
    except (zmq.ZMQError, OSError):
        router.close()
        raise
    return router


def _set_common(socket: Socket) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
