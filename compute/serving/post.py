"""The ROUTER socket towards the frontends: frames in, messages out, nobody waited for."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import zmq

from protocol.errors import ConfigError
from protocol.wire.codec import encode
from protocol.wire.messages import Message, Refused
from protocol.wire.sockets import open_router

from .sessions import Session

_MAX_FRAMES_AT_ONCE = 64
_LINGER_MS = 200  # for the last messages, when the service ends
# A full pipe may only mean that ZeroMQ's own thread has not run on a busy machine.
_SEND_PAUSES_S = (0.0, 0.0002, 0.001, 0.0)


class Post:
    """Binds `ipc://path`. Raises ConfigError; the caller holds the lock."""

    def __init__(self, path: Path, generation: int) -> None:
        self._generation = generation
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self.socket = open_router(self._context, path)
        except (zmq.ZMQError, OSError) as error:
            self._context.term()
            raise ConfigError(f"{path}: cannot be bound: {error.strerror}") from error

    def arrived(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield (route, frame) of some that have come; a message of several frames is b""."""
        for _ in range(_MAX_FRAMES_AT_ONCE):
            try:
                route, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield route, frames[0] if len(frames) == 1 else b""

    def send(self, session: Session, message: Message) -> bool:
        """Send to a session; False where its frontend is gone or does not read."""
        return self._send(session.route, encode(message, session.number, self._generation))

    def refuse(
        self,
        route: bytes,
        session: Session | None,
        reason: str,
        text: str,
        *,
        request: int = 0,
        retry_ms: int = 0,
    ) -> None:
        """Say no to whoever sent a message; nobody minds where that cannot be delivered."""
        refusal = Refused(reason, text, retry_ms, os.getpid(), max(request, 0))
        number = 0 if session is None else session.number
        self._send(route, encode(refusal, number, self._generation))

    def close(self) -> None:
        """Close the socket, the last messages being sent."""
        self.socket.close(linger=_LINGER_MS)
        self._context.term()

    def _send(self, route: bytes, frame: bytes) -> bool:
        for pause in _SEND_PAUSES_S:
            try:
                self.socket.send_multipart((route, frame), zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno == zmq.EHOSTUNREACH:
                    return False
                if error.errno != zmq.EAGAIN:
                    raise
                time.sleep(pause)
            else:
                return True
        return False
