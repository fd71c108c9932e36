"""A frontend on a thread of this process, and a small HTTP client for odd requests."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

from compute.frontend.config import FrontendConfig
from compute.frontend.listener import listen
from compute.frontend.server import HttpServer
from compute.frontend.service import Frontend
from protocol.wire.sockets import RuntimePaths

ROOT = Path(__file__).resolve().parents[2]


def eventually(holds: Callable[[], Any], seconds: float = 10.0) -> None:
    """Wait until something holds."""
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends, "it never came to hold"
        time.sleep(0.01)


@dataclass(frozen=True)
class Reply:
    """An HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[tuple[str, Any]]:
        """(event, data) of a stream; comments are left out."""
        found = []
        for block in self.body.decode().split("\n\n"):
            lines = [line for line in block.splitlines() if not line.startswith(":")]
            fields = dict(line.split(": ", 1) for line in lines)
            if "data" in fields:
                data = fields["data"]
                found.append(
                    (fields.get("event", ""), data if data == "[DONE]" else json.loads(data))
                )
        return found


def ask(
    url: str,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    *,
    method: str | None = None,
    timeout: float = 30,
) -> Reply:
    """One request on a connection of its own; a body that is no bytes is sent as JSON."""
    with contextlib.closing(connect(url, timeout)) as connection:
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(
            method or ("GET" if raw is None else "POST"), path, raw, headers=headers or {}
        )
        answer = connection.getresponse()
        return Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())


def connect(url: str, timeout: float = 30) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    assert parts.hostname is not None
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)


class RunningFrontend:
    """A frontend of the demo model in front of whatever compute is in `runtime_dir`."""

    def __init__(self, runtime_dir: Path, **settings: Any) -> None:
        config = FrontendConfig(
            model=str(ROOT / "demo"), runtime_dir=runtime_dir, port=0, **settings
        )
        self.frontend = Frontend(config, RuntimePaths.of_compute(runtime_dir))
        self.listener = listen(config)
        self.server = HttpServer(self.frontend, self.listener)
        self.url = self.server.url
        self._thread = threading.Thread(
            target=lambda: uvloop.run(self.server.serve_all()), daemon=True
        )
        self._thread.start()
        eventually(lambda: self.server.started)

    def ask(self, path: str, body: Any = None, **more: Any) -> Reply:
        return ask(self.url, path, body, **more)

    def joined(self) -> None:
        """Wait until compute is there."""
        eventually(lambda: self.frontend.link.joined is not None)

    def close(self) -> None:
        self.server.stop()
        self._thread.join(10)
        assert not self._thread.is_alive()
        self.listener.close()


@contextlib.contextmanager
def running_frontend(runtime_dir: Path, **settings: Any) -> Iterator[RunningFrontend]:
    """A RunningFrontend, closed at the end."""
    frontend = RunningFrontend(runtime_dir, **settings)
    try:
        yield frontend
    finally:
        frontend.close()


def ask_and_leave(url: str, path: str, body: Any, after_s: float) -> None:
    """Send a request whole, and reset its connection some time later."""
    with contextlib.closing(connect(url)) as connection:
        connection.request("POST", path, json.dumps(body))
        time.sleep(after_s)
        linger = struct.pack("ii", 1, 0)
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
