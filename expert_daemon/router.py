"""The daemon's ROUTER socket on the loop: frames in, messages out, nobody waited for.

The socket's raw descriptor is edge-triggered: it is drained until a receive finds nothing, and
looked at again after sends outside of that.

Invariants: one thread; sends wait a few milliseconds of any second and no more, all of them
together; a client that cannot be sent to is reported.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from protocol.errors import ConfigError
from protocol.wire.sockets import open_router

from .allowance import Allowance

if TYPE_CHECKING:
    from protocol.wire.sockets import Context

MAX_MESSAGES_AT_ONCE = 32  # then the loop's other work has its turn
# A full pipe may only mean that ZeroMQ's own thread has not run on a busy machine.
SEND_PAUSES_S = (0.0, 0.0002, 0.001, 0.0)
# Of any second: who does not read, and says Hello again and again, costs the others no more.
PATIENCE_S = 0.004
# As plain numbers: combining enumerations takes longer than the calls that they are for.
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_RCVMORE = int(zmq.RCVMORE)


class Router:
    """Binds `ipc://path`; calls `receive(route, frames)` for each message that comes."""

    def __init__(
        self,
        path: Path,
        loop: asyncio.AbstractEventLoop,
        receive: Callable[[bytes, list[bytes]], None],
    ) -> None:
        """Raises ConfigError where the path cannot be bound; the caller holds the lock."""
        self._loop = loop
        self._receive = receive
        self._context: Context = zmq.Context()
        try:
            self._socket = open_router(self._context, path)
        except (zmq.ZMQError, OSError) as error:
            self._context.term()
            raise ConfigError(f"{path}: cannot be bound: {error.strerror}") from error
        self._patience = Allowance(PATIENCE_S, 1.0)
        self._descriptor: int = self._socket.FD
        loop.add_reader(self._descriptor, self._drain)
        loop.call_soon(self._drain)

    def send(self, route: bytes, frame: bytes, *, patient: bool = True) -> bool:
        """Send one frame to one client; False where it is gone or does not read.

        patient  wait a moment for one whose pipe is full, while there is patience left: not for
                 somebody who may be flooding us
        """
        for pause in SEND_PAUSES_S:
            try:
                self._socket.send(route, _NOBLOCK_MORE)
                self._socket.send(frame, _NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno == zmq.EHOSTUNREACH:
                    return False
                if error.errno != zmq.EAGAIN:
                    raise
                if not (patient and self._patience.spend(pause)):
                    return False
                time.sleep(pause)
            else:
                return True
        return False

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
        self._socket.close(linger=0)
        self._context.term()

    def _has_message(self) -> bool:
        return not self._socket.closed and bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN)

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
