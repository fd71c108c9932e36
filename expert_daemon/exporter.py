"""The metrics endpoint: a process beside the daemon that asks it for its statistics when scraped.

Run as `python -m expert_daemon.exporter RUNTIME_DIR ADDRESS`; the daemon does so when it was given
`--metrics`. A process of its own, so that rendering and HTTP never take the daemon's interpreter.
It is an ordinary reader of the daemon's and ends with it. The main thread owns the client. That it
serves, or why it ends, it says on standard output: who began it knows whether that is news.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue

import numpy as np
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
from .exporter_child import SERVING
from .log import ClientLog
from .metrics_address import parse_address
from .scrape_server import ScrapeServer, make_server

HELLO_MS = 10_000
POLL_S = 2.0  # Pings are answered at least so often
ANSWER_S = 5.0  # more than the client's own deadline

Answer = tuple[Values, Sequence[int]]  # the statistics, experts in the arena of each layer
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
    """Has the daemon asked at each scrape; one that does not answer is down.

    `collect` runs on the requests' threads, `answer` on the one that owns the client. All that wait
    at once get the same answer.
    """

    def __init__(self, clients: ClientLog) -> None:
        self._asked: SimpleQueue[Future[Answer | None]] = SimpleQueue()
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._clients = clients

    def fileno(self) -> int:
        """Return what is readable when `answer` has to be called."""
        return self._woken

    def collect(self) -> Iterator[Family]:
        """Yield the metrics of now."""
        wanted: Future[Answer | None] = Future()
        self._asked.put(wanted)
        os.eventfd_write(self._woken, 1)
        answer = wanted.result(ANSWER_S)
        if answer is None:
            yield GaugeMetricFamily(UP[0], UP[2], value=0.0)
        else:
            yield from families(*answer)

    def answer(self, client: ExpertClient) -> None:
        """Ask the daemon once for all that wait, if any do."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._woken)
        waiting = [self._asked.get() for _ in range(self._asked.qsize())]
        if not waiting:
            return
        answer = self._ask(client)
        for wanted in waiting:
            wanted.set_result(answer)

    def _ask(self, client: ExpertClient) -> Answer | None:
        try:
            values = client.stats()
            table = client.arena.table_snapshot()
        except HeadraceError as error:
            self._clients.note(f"metrics: {error}")
            return None
        resident = [] if table is None else np.count_nonzero(table >= 0, axis=1).tolist()
        return values, resident


def serve(client: ExpertClient, collector: DaemonCollector, server: ScrapeServer) -> None:
    """Answer scrapes until the daemon is gone."""
    while True:
        awaited = [client.fileno(), collector.fileno(), *server.descriptors()]
        select.select(awaited, [], [], server.patience(POLL_S))
        server.tend()
        collector.answer(client)
        client.poll()


def main(arguments: Sequence[str]) -> int:
    """Serve and return the exit status: 0 once the daemon is gone."""
    runtime_dir, text = arguments
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        address = parse_address(text)
        with ExpertClient(runtime_dir, hello_ms=HELLO_MS) as client:
            clients = ClientLog()
            collector = DaemonCollector(clients)
            server = make_server(address, collector, clients)
            _say(SERVING)
            try:
                serve(client, collector, server)
            finally:
                server.server_close()
                if address.path:
                    Path(address.path).unlink(missing_ok=True)
    except ConfigError as error:
        _say(str(error))
        return 1
    except HeadraceError:
        return 0  # the daemon is gone
    return 0


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        os.write(sys.stdout.fileno(), f"{line.replace(chr(10), ' ')}\n".encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
