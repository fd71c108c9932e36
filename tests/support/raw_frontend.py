"""A frontend's side of the conversation with compute, blocking, for tests that say odd things."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, Self

import zmq

from protocol.arena.attach import AttachRequest
from protocol.wire import messages as m
from protocol.wire.codec import decode, encode
from protocol.wire.sockets import RuntimePaths, open_dealer


class RawFrontend:
    """A DEALER towards compute; `join` makes it a session."""

    def __init__(self, runtime_dir: Path) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.dealer = open_dealer(self._context, RuntimePaths.of_compute(runtime_dir).socket)
        self.joined = m.Joined(1, 0, "", 1, 1)
        self.life: socket.socket | None = None
        self.session = self.generation = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        if self.life is not None:
            self.life.close()
        self.dealer.close(linger=0)
        self._context.term()

    def join(self, fingerprint: bytes, *, pid: int = 0, attach: bool = True) -> Any:
        """Say Join, and attach; the answer to Join."""
        self.say(m.Join(m.PROTOCOL_VERSION, fingerprint, pid or os.getpid()))
        answer = self.hear()
        if isinstance(answer, m.Joined):
            self.joined = answer
            self.session, self.generation = answer.session, answer.generation
            if attach:
                assert self.attach() == b"ok"
        return answer

    def attach(self) -> bytes:
        """Connect the life socket; what it says."""
        self.life = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.life.settimeout(5)
        self.life.connect(self.joined.life_address)
        self.life.send(AttachRequest(self.session, self.generation).pack())
        return self.life.recv(256)

    def say(self, message: Any) -> None:
        self.say_frame(encode(message, self.session, self.generation))

    def say_frame(self, *frames: bytes) -> None:
        assert self.dealer.poll(5000, zmq.POLLOUT)
        self.dealer.send_multipart(frames)

    def hear(self, timeout_ms: int = 5000) -> Any:
        """The next message; None where none comes."""
        if not self.dealer.poll(timeout_ms):
            return None
        return decode(self.dealer.recv()).message

    def hear_until(self, kind: type) -> list[Any]:
        """All messages up to the first of a kind."""
        heard: list[Any] = []
        while not heard or not isinstance(heard[-1], kind):
            message = self.hear()
            assert message is not None, f"{kind.__name__} did not come, but {heard}"
            heard.append(message)
        return heard
