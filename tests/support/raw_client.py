"""A bare DEALER, for frames that the client library would not send."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self

import zmq

from protocol.wire import messages as m
from protocol.wire.codec import decode, encode


class RawClient:
    """Sends any frames to a daemon; answers come decoded."""

    def __init__(self, runtime_dir: Path) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(f"ipc://{runtime_dir}/expertd.sock")

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def ask(self, frame: bytes, timeout_ms: int = 5000) -> Any:
        """The next message that comes after sending a frame, or None."""
        self.send(frame)
        return self.answer(timeout_ms)

    def answer(self, timeout_ms: int = 5000) -> Any:
        """The next message that comes, or None."""
        if not self.socket.poll(timeout_ms):
            return None
        return decode(self.socket.recv()).message

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self._context.term()


def hello(**changes: Any) -> bytes:
    """The frame of a reader's Hello, with these fields changed."""
    fields: dict[str, Any] = {
        "version": m.PROTOCOL_VERSION,
        "role": "reader",
        "fingerprint": b"",
        "arena_id": b"",
        "top_k_batch": 0,
        "pid": os.getpid(),
    }
    return encode(m.Hello(**(fields | changes)))
