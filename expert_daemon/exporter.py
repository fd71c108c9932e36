"""The metrics endpoint: a process beside the daemon that asks it for its statistics when scraped.

Run as `python -m expert_daemon.exporter RUNTIME_DIR ADDRESS`; the daemon does so when it was given
`--metrics`. A process of its own, so that rendering and HTTP never take the daemon's interpreter.
It is an ordinary reader of the daemon's and ends with it.
"""

from __future__ import annotations

import select
import signal
import socket
import socketserver
import sys
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, exposition
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.registry import Collector

from protocol.errors import ConfigError, HeadraceError
from protocol.wire.client import ExpertClient

from .exported import (
    INFO,
    INFO_LABELS,
    METRICS,
    READ_SECONDS,
    RESIDENT,
    UP,
    Values,
    read_buckets,
    samples,
)
from .log import log
from .metrics_address import MetricsAddress, parse_address

HELLO_MS = 10_000
REQUEST_S = 5.0  # a scraper that sends nothing for so long is hung up on
BIND_S = 5.0  # a predecessor may still hold the address
POLL_S = 2.0  # Pings are answered at least so often

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily | InfoMetricFamily


def families(values: Values, resident: Sequence[int]) -> Iterator[Family]:
    """Yield every metric; `resident` counts the experts of each layer in the arena."""
    yield GaugeMetricFamily(UP[0], UP[2], value=1.0)
    settings = {name: str(values.get(name, "")) for name in INFO_LABELS}
    yield InfoMetricFamily(INFO[0], INFO[2], value=settings)
    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
    for metric in METRICS:
        label_names = [name for name, _ in metric.stats[0][0]]
        family = kinds[metric.kind](metric.name, metric.help, labels=label_names)
        for labels, value in samples(metric, values):
            family.add_metric([label for _, label in labels], value)
        yield family
    seconds = float(values.get("read_ns", 0)) / 1e9
    yield HistogramMetricFamily(
        READ_SECONDS[0], READ_SECONDS[2], buckets=read_buckets(values), sum_value=seconds
    )
    by_layer = GaugeMetricFamily(RESIDENT[0], RESIDENT[2], labels=["layer"])
    for layer, count in enumerate(resident):
        by_layer.add_metric([str(layer)], float(count))
    yield by_layer


class DaemonCollector(Collector):
    """Asks the daemon at each scrape; a daemon that does not answer is down."""

    def __init__(self, client: ExpertClient) -> None:
        self._client = client

    def collect(self) -> Iterator[Family]:
        """Yield the metrics of now."""
        try:
            values = self._client.stats()
            table = self._client.arena.table_snapshot()
        except HeadraceError as error:
            log(f"metrics: {error}")
            yield GaugeMetricFamily(UP[0], UP[2], value=0.0)
            return
        resident = [] if table is None else np.count_nonzero(table >= 0, axis=1).tolist()
        yield from families(values, resident)


class _UnixServer(HTTPServer):
    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        """Bind to the path, in the place of one that was left over."""
        path = Path(str(self.server_address))
        path.unlink(missing_ok=True)
        socketserver.TCPServer.server_bind(self)
        path.chmod(0o600)
        self.server_name, self.server_port = "localhost", 0


class _Server6(HTTPServer):
    address_family = socket.AF_INET6


def make_server(address: MetricsAddress, collector: Collector) -> HTTPServer:
    """Return a bound server; raises ConfigError where the address stays taken."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)

    class Handler(_Handler):
        found = registry

    kind, place = _place(address)
    end = time.monotonic() + BIND_S
    while True:
        try:
            return kind(place, Handler)
        except OSError as error:
            if time.monotonic() > end:
                raise ConfigError(f"--metrics: {place}: {error.strerror}") from error
            time.sleep(0.1)


def _place(address: MetricsAddress) -> tuple[type[HTTPServer], Any]:
    if address.path:
        return _UnixServer, address.path
    kind = _Server6 if ":" in address.host else HTTPServer
    return kind, (address.host, address.port)


class _Handler(BaseHTTPRequestHandler):
    found: CollectorRegistry
    timeout = REQUEST_S

    def do_GET(self) -> None:
        """Answer a scrape."""
        encoder, content_type = exposition.choose_encoder(self.headers.get("Accept", ""))
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "only /metrics is here")
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


def serve(client: ExpertClient, server: HTTPServer) -> None:
    """Answer scrapes until the daemon is gone."""
    while True:
        ready, _, _ = select.select([server.fileno(), client.fileno()], [], [], POLL_S)
        if server.fileno() in ready:
            server.handle_request()
        client.poll()


def main(arguments: Sequence[str]) -> int:
    """Serve and return the exit status: 0 once the daemon is gone."""
    runtime_dir, text = arguments
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        address = parse_address(text)
        with ExpertClient(runtime_dir, hello_ms=HELLO_MS) as client:
            server = make_server(address, DaemonCollector(client))
            try:
                serve(client, server)
            finally:
                server.server_close()
                if address.path:
                    Path(address.path).unlink(missing_ok=True)
    except ConfigError as error:
        log(f"metrics: {error}")
        return 1
    except HeadraceError:
        return 0  # the daemon is gone
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
