"""The daemon's ROUTER socket on the loop: frames in, messages out, nobody waited for.

The socket's raw descriptor is edge-triggered: it is drained until a receive finds nothing, and
looked at again after sends outside of that.

Invariants: one thread; sends never wait; a client that cannot be sent to is reported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from protocol.errors import ConfigError
from protocol.wire.replies import FLUSH_S, Replies
from protocol.wire.sockets import open_router

if TYPE_CHECKING:
    from protocol.wire.sockets import Context

MAX_MESSAGES_AT_ONCE = 32  # then the loop's other work has its turn
# As plain numbers: enumerations take longer than the calls that they are for.
_NOBLOCK = int(zmq.NOBLOCK)
_RCVMORE = int(zmq.RCVMORE)


class Router:
    """Binds `ipc://path`; calls `receive(route, frames)` for each message that comes.

    `lost(route)` is called where frames waited for a client that is gone or does not read.
    """

    def __init__(
        self,
        path: Path,
        loop: asyncio.AbstractEventLoop,
        receive: Callable[[bytes, list[bytes]], None],
        lost: Callable[[bytes], None],
    ) -> None:
        """Raises ConfigError where the path cannot be bound; the caller holds the lock."""
        self._loop = loop
        self._receive = receive
        self._lost = lost
        self._next_flush: asyncio.TimerHandle | None = None
        self._context: Context = zmq.Context()
        try:
            self._socket = open_router(self._context, path)
        except (zmq.ZMQError, OSError) as error:
            self._context.term()
            raise ConfigError(f"{path}: cannot be bound: {error.strerror}") from error
        self._replies = Replies(self._socket)
        self._descriptor: int = self._socket.FD
        loop.add_reader(self._descriptor, self._drain)
        loop.call_soon(self._drain)

    def send(self, route: bytes, frame: bytes, *, keep: bool = True) -> bool:
        """Send one frame to one client, as `Replies.send`."""
        is_sent = self._replies.send(route, frame, keep=keep)
        if self._next_flush is None and self._replies.any_wait:
            self._next_flush = self._loop.call_later(FLUSH_S, self._flush)
        return is_sent

    def look_again(self) -> None:
        """Call after sends outside of `receive`: they may have used up the descriptor's edge."""
        if self._has_message():
            self._loop.call_soon(self._drain)

    def stop_receiving(self) -> None:
        """Take no further message; sends still go out."""
        self._loop.remove_reader(self._descriptor)
        self._receive = _ignore

    def close(self) -> None:
        """Close the socket and its context."""
        if self._next_flush is not None:
            self._next_flush.cancel()
        self._socket.close(linger=0)
        self._context.term()

    def _has_message(self) -> bool:
        return not self._socket.closed and bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN)

    def _flush(self) -> None:
        self._next_flush = None
        lost = self._replies.flush()
        if self._replies.any_wait:
            self._next_flush = self._loop.call_later(FLUSH_S, self._flush)
        for route in lost:
            self._lost(route)
        self.look_again()

    def _drain(self) -> None:
        if self._socket.closed:
            return
        receive = self._socket.recv
        for _ in range(MAX_MESSAGES_AT_ONCE):
            try:
                route, frames = receive(_NOBLOCK), [receive(_NOBLOCK)]
            except zmq.Again:
                return
            while self._socket.get(_RCVMORE):
                frames.append(receive(_NOBLOCK))
            self._receive(route, frames)
        self._loop.call_soon(self._drain)


def _ignore(_route: bytes, _frames: list[bytes]) -> None:
    """Takes a message that came after the end."""
