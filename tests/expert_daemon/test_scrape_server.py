"""The HTTP server of the metrics endpoint, and scrapers that do it harm."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from expert_daemon import scrape_server
from expert_daemon.log import ClientLog
from expert_daemon.metrics_address import MetricsAddress
from expert_daemon.scrape_server import ScrapeServer, make_server

pytestmark = pytest.mark.timeout(30)

Starts = Callable[[], int]


class _One(Collector):
    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield GaugeMetricFamily("one", "One.", value=1.0)


@pytest.fixture
def start() -> Iterator[Starts]:
    """Gives a function that starts a server and returns its port."""
    stopping = threading.Event()
    begun: list[tuple[ScrapeServer, threading.Thread]] = []

    def tended(server: ScrapeServer) -> None:
        while not stopping.is_set():
            time.sleep(server.patience(0.01))
            server.tend()

    def started() -> int:
        server = make_server(MetricsAddress(host="127.0.0.1", port=0), _One(), ClientLog())
        thread = threading.Thread(target=tended, args=(server,))
        thread.start()
        begun.append((server, thread))
        return int(server.server_port)

    yield started
    stopping.set()
    for server, thread in begun:
        thread.join()
        server.server_close()


def _scrape(port: int, accept: str = "") -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/metrics", headers={"Accept": accept} if accept else {})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def _is_hung_up_on(connection: socket.socket) -> bool:
    try:
        return connection.recv(1000) == b""
    except ConnectionError:
        return True


def test_one_that_drips_keeps_nobody_and_ends_at_the_deadline(
    start: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrape_server, "CONNECTION_S", 1.0)
    port = start()
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=0.05) as dripping:
        dripping.sendall(b"GET /nothing HTTP/1.0\r\nX: ")
        assert _scrape(port) == 200
        assert time.monotonic() - began < 1
        for _ in range(200):
            try:
                dripping.sendall(b"a")
                dripping.recv(1000)
                break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            raise AssertionError("it was never hung up on")
    assert time.monotonic() - began >= 1


def test_where_too_many_say_nothing_the_oldest_makes_room(
    start: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrape_server, "MAX_CONNECTIONS", 2)
    port = start()
    began = time.monotonic()
    silent = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(5)]
    assert _scrape(port) == 200
    assert time.monotonic() - began < 3
    assert all(_is_hung_up_on(connection) for connection in silent[:4])
    silent[4].sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    assert silent[4].recv(12) == b"HTTP/1.0 200"
    for connection in silent:
        connection.close()


@pytest.mark.parametrize("version", ["zz", "1.x"])
def test_what_accepts_no_version_that_there_is_gets_400(
    start: Starts, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr("expert_daemon.log.log", lines.append)
    port = start()
    assert _scrape(port, f"application/openmetrics-text; version={version}") == 400
    assert _scrape(port, "application/openmetrics-text; version=1.0.0") == 200
    assert not lines


def test_what_fails_again_and_again_fills_no_log(
    start: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr("expert_daemon.log.log", lines.append)
    monkeypatch.setattr("expert_daemon.log.CLIENT_LINES_A_MINUTE", 3)
    port = start()
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as rude:
            rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            rude.sendall(b"GET /metrics HTTP/1.0\r\n")
    assert _scrape(port) == 200
    assert 1 <= len(lines) <= 3
    assert all(line.startswith("metrics: a request was not answered: Conn") for line in lines)
