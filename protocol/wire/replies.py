"""What a service sends on its ROUTER socket: at once, or as soon as the client's pipe has room.

A full pipe does not mean that a client does not read: on a busy machine ZeroMQ's own threads may
not have run for a while, or the client computes. Its frames wait here, in order; nobody else does.

Invariants: nothing blocks; what waits for one client is bounded in bytes and in time.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import zmq

from .limits import DEAF_MS, MOST_WAITING_BYTES

if TYPE_CHECKING:
    from .sockets import Socket

FLUSH_S = 0.005  # how often to flush while frames wait
# Of the time between two flushes no more counts as a client's silence: this process may have been
# stopped.
_MOST_STEP_S = 0.1
# As plain numbers: combining enumerations takes longer than the calls that they are for.
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


@dataclass(slots=True)
class _Waiting:
    """Frames of one client."""

    frames: deque[bytes] = field(default_factory=deque)
    n_bytes: int = 0
    deaf_s: float = 0.0  # since it last took one


class Replies:
    """Sends on `router`, whose thread must be the caller's.

    While `any_wait`, `flush` is to be called every FLUSH_S.
    """

    def __init__(self, router: Socket) -> None:
        self._router = router
        self._waiting: dict[bytes, _Waiting] = {}
        self._looked_at = time.monotonic()

    @property
    def any_wait(self) -> bool:
        """Whether frames wait for room."""
        return bool(self._waiting)

    def send(self, route: bytes, frame: bytes, *, keep: bool = True) -> bool:
        """Send one frame to one client; False where it is gone or does not read.

        keep  let it wait where the pipe is full: not for somebody who may be flooding us
        """
        if route not in self._waiting:
            try:
                return self._is_taken(route, frame) or (keep and self._keep(route, frame))
            except _Gone:
                return False
        return keep and self._keep(route, frame)

    def flush(self) -> list[bytes]:
        """Send what there is room for; return the routes of those that are gone or do not read."""
        now = time.monotonic()
        step_s = min(now - self._looked_at, _MOST_STEP_S)
        self._looked_at = now
        lost = [route for route in self._waiting if not self._is_flushed(route, step_s)]
        self._waiting = {
            route: waiting
            for route, waiting in self._waiting.items()
            if waiting.frames and route not in lost
        }
        return lost

    def _keep(self, route: bytes, frame: bytes) -> bool:
        """Let a frame wait; False where too much does already, which is given up."""
        if not self._waiting:
            self._looked_at = time.monotonic()
        waiting = self._waiting.setdefault(route, _Waiting())
        if waiting.n_bytes > MOST_WAITING_BYTES:
            del self._waiting[route]
            return False
        waiting.frames.append(frame)
        waiting.n_bytes += len(frame)
        return True

    def _is_flushed(self, route: bytes, step_s: float) -> bool:
        """Send one client what it takes now; False where it is given up."""
        waiting = self._waiting[route]
        waiting.deaf_s += step_s
        try:
            while waiting.frames and self._is_taken(route, waiting.frames[0]):
                waiting.n_bytes -= len(waiting.frames.popleft())
                waiting.deaf_s = 0.0
        except _Gone:
            return False
        return waiting.deaf_s < DEAF_MS / 1000

    def _is_taken(self, route: bytes, frame: bytes) -> bool:
        """Whether there was room for it. Raises _Gone."""
        try:
            self._router.send(route, _NOBLOCK_MORE)
            self._router.send(frame, _NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise _Gone from None
            if error.errno != zmq.EAGAIN:
                raise
            return False
        return True


class _Gone(Exception):
    """Nobody is at this route any more."""
