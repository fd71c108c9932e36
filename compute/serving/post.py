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
from protocol.wire.replies import FLUSH_S, Replies
from protocol.wire.sockets import open_router

from .sessions import Session

_MAX_FRAMES_AT_ONCE = 64
_LINGER_MS = 200  # for the last messages, when the service ends
_FLUSH_MS = round(1000 * FLUSH_S)


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
        self._replies = Replies(self.socket)

    def arrived(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield (route, frame) of some that have come; a message of several frames is b""."""
        for _ in range(_MAX_FRAMES_AT_ONCE):
            try:
                route, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield route, frames[0] if len(frames) == 1 else b""

    def wait_ms(self, most_ms: int) -> int:
        """How long to wait at most before `flush` is due."""
        return min(most_ms, _FLUSH_MS) if self._replies.any_wait else most_ms

    def flush(self) -> list[bytes]:
        """Send what waited for room; return the routes of those that are gone or do not read."""
        return self._replies.flush()

    def send(self, session: Session, message: Message) -> bool:
        """Send to a session; False where its frontend is gone or does not read."""
        frame = encode(message, session.number, self._generation)
        return self._replies.send(session.route, frame)

    def refuse(
        self,
        route: bytes,
        session: Session | None,
        reason: str,
        text: str,
        *,
        request: int = 0,
        retry_ms: int = 0,
    ) -> bool:
        """Say no to whoever sent a message, as `send`; who has no session need not read it."""
        refusal = Refused(reason, text, retry_ms, os.getpid(), max(request, 0))
        number = 0 if session is None else session.number
        frame = encode(refusal, number, self._generation)
        return self._replies.send(route, frame, keep=session is not None)

    def drain(self) -> None:
        """Wait a moment for those who read to make room for what waits."""
        ends = time.monotonic() + _LINGER_MS / 1000
        while self._replies.any_wait and time.monotonic() < ends:
            time.sleep(FLUSH_S)
            self._replies.flush()

    def close(self) -> None:
        """Close the socket, the last messages being sent."""
        self.socket.close(linger=_LINGER_MS)
        self._context.term()
