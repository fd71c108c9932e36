"""The metrics endpoint's HTTP server: a thread for each connection, few at once, none for long.

Invariants: at most MAX_CONNECTIONS are open, and where one more comes, the oldest is hung up on; so
is whatever is open for CONNECTION_S, however busy it looks. What connections bring about in the log
is bounded. The thread that calls `tend` accepts and hangs up; a request has a thread of its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import socketserver
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, exposition
from prometheus_client.registry import Collector

from protocol.errors import ConfigError

from .log import ClientLog
from .metrics_address import MetricsAddress

MAX_CONNECTIONS = 8
CONNECTION_S = 5.0  # from its begin to its end
BIND_S = 5.0  # a predecessor may still hold the address
_MAX_LINE = 200


class ScrapeServer(socketserver.ThreadingMixIn, HTTPServer):
    """Serves one page to a few at once; `tend` is to be called again and again."""

    daemon_threads = True

    def __init__(
        self, place: Any, handler: type[BaseHTTPRequestHandler], clients: ClientLog
    ) -> None:
        super().__init__(place, handler)
        self._lock = threading.Lock()  # of the two below
        self._ends_at: dict[socket.socket, float] = {}  # oldest first; inf: was hung up on
        self._clients = clients
        self._ended = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def descriptors(self) -> list[int]:
        """Return what `tend` has to do with as soon as it is readable."""
        with self._lock:
            is_full = len(self._ends_at) >= MAX_CONNECTIONS
            waits = is_full and math.inf in self._ends_at.values()  # for that one's thread
        return [self._ended] if waits else [self._ended, self.fileno()]

    def patience(self, seconds: float) -> float:
        """Return how long `tend` may be left alone, `seconds` at most."""
        with self._lock:
            first = min(self._ends_at.values(), default=math.inf)
        return max(0.0, min(seconds, first - time.monotonic()))

    def tend(self) -> None:
        """Hang up on whom it is time to, and accept one that waits."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._ended)
        now = time.monotonic()
        with self._lock:
            for connection, ends_at in self._ends_at.items():
                if ends_at <= now:
                    self._hang_up(connection)
        if not select.select([self], [], [], 0)[0]:
            return
        with self._lock:
            is_full = len(self._ends_at) >= MAX_CONNECTIONS
            if is_full and math.inf not in self._ends_at.values():
                self._hang_up(next(iter(self._ends_at)))
        if not is_full:
            self.handle_request()

    def _hang_up(self, connection: socket.socket) -> None:
        """Wake its thread, which closes it."""
        self._ends_at[connection] = math.inf
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer it on a thread of its own."""
        with self._lock:
            self._ends_at[request] = time.monotonic() + CONNECTION_S
        super().process_request(request, client_address)

    def close_request(self, request: Any) -> None:
        """Close the connection, whose place is free then."""
        with self._lock:
            self._ends_at.pop(request, None)
            super().close_request(request)
        os.eventfd_write(self._ended, 1)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - as its base
        """Say in one line what ended a connection; a scraper can bring this about at will."""
        error = sys.exc_info()[1]
        line = f"metrics: a request was not answered: {type(error).__name__}: {error}"
        self._clients.note(line[:_MAX_LINE])


class _UnixServer(ScrapeServer):
    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        """Bind to the path, in the place of one that was left over."""
        path = Path(str(self.server_address))
        path.unlink(missing_ok=True)
        socketserver.TCPServer.server_bind(self)
        path.chmod(0o600)
        self.server_name, self.server_port = "localhost", 0


class _Server6(ScrapeServer):
    address_family = socket.AF_INET6


def make_server(address: MetricsAddress, collector: Collector, clients: ClientLog) -> ScrapeServer:
    """Return a bound server; raises ConfigError where the address stays taken."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)

    class Handler(_Handler):
        found = registry

    kind, place = _place(address)
    end = time.monotonic() + BIND_S
    while True:
        try:
            return kind(place, Handler, clients)
        except OSError as error:
            if time.monotonic() > end:
                raise ConfigError(f"--metrics: {place}: {error.strerror}") from error
            time.sleep(0.1)


def _place(address: MetricsAddress) -> tuple[type[ScrapeServer], Any]:
    if address.path:
        return _UnixServer, address.path
    kind = _Server6 if ":" in address.host else ScrapeServer
    return kind, (address.host, address.port)


class _Handler(BaseHTTPRequestHandler):
    found: CollectorRegistry
    timeout = CONNECTION_S

    def do_GET(self) -> None:
        """Answer a scrape."""
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "only /metrics is here")
            return
        try:
            encoder, content_type = exposition.choose_encoder(self.headers.get("Accept", ""))
        except (TypeError, ValueError):  # a version that is none
            self.send_error(400, "what it accepts cannot be read")
            return
        body = encoder(self.found)
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        """Say nothing: a scrape is no event."""

    def address_string(self) -> str:
        """Return who asks, which a Unix socket does not say."""
        return "local"
