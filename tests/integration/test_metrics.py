"""The metrics endpoint of a real daemon, and the page that describes it."""

from __future__ import annotations

import http.client
import re
import socket
import time
from pathlib import Path

import pytest

from expert_daemon.exported import ALL_NAMES, METRICS
from protocol.files.checkpoint import open_checkpoint
from protocol.wire.client import ExpertClient
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.running_daemon import daemon_process

prometheus_parser = pytest.importorskip("prometheus_client.parser")
pytestmark = pytest.mark.timeout(60)

N_LAYERS, N_EXPERTS, TOP_K = 6, 16, 2
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    return write_fake_checkpoint(directory, n_layers=N_LAYERS, n_experts=N_EXPERTS, top_k=TOP_K)


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("localhost", timeout=5)
        self._path = str(path)

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(5)
        self.sock.connect(self._path)


def scrape(make_connection, page="/metrics", seconds=15.0):
    """(status, text) once the exporter is there."""
    end = time.monotonic() + seconds
    while True:
        connection = make_connection()
        try:
            connection.request("GET", page)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.05)
        finally:
            connection.close()


def found_samples(text):
    families = prometheus_parser.text_string_to_metric_families(text)
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_scrape_shows_what_the_daemon_did(model, runtime_dir):
    path = runtime_dir / "m.sock"
    checkpoint = open_checkpoint(model)
    with (
        daemon_process(model, runtime_dir, "--metrics", f"unix:{path}") as daemon,
        ExpertClient(runtime_dir, "engine", checkpoint.fingerprint, TOP_K) as engine,
    ):
        for _ in range(2):
            answer = engine.miss(3, range(8))
            engine.applied = answer.to_version
        engine.touch(9, [(3, expert) for expert in range(8)])
        engine.ping()
        status, text = scrape(lambda: UnixConnection(path))
        assert status == 200
        values = found_samples(text)
        assert values["headrace_up",] == 1
        assert values["headrace_misses_total",] == 8
        assert values["headrace_reads_total",] == 8
        assert (
            values["headrace_read_bytes_total",] == answer.n_bytes or engine.stats()["bytes_read"]
        )
        assert values["headrace_hits_total", ("tier", "arena")] == 8
        assert values["headrace_resident_experts", ("layer", "3")] == 8
        assert values["headrace_resident_experts", ("layer", "0")] == 0
        assert values["headrace_read_seconds_count",] == 8
        assert values["headrace_read_seconds_bucket", ("le", "+Inf")] == 8
        assert values["headrace_clients",] == 2
        names = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
        assert names == set(ALL_NAMES)
        assert path.stat().st_mode & 0o077 == 0
        assert scrape(lambda: UnixConnection(path), "/")[0] == 404
        _, text = scrape(lambda: UnixConnection(path))
        assert daemon.stop() == 0
    end = time.monotonic() + 5
    while path.exists():
        assert time.monotonic() < end


def test_it_is_served_on_loopback_and_again_by_the_next_daemon(model, runtime_dir):
    port = free_port()
    address = f"127.0.0.1:{port}"

    def connect():
        return http.client.HTTPConnection("127.0.0.1", port, timeout=5)

    with daemon_process(model, runtime_dir, "--metrics", address) as daemon:
        assert "headrace_generation 1.0" in scrape(connect)[1]
        daemon.kill()
        daemon.start()
        end = time.monotonic() + 10
        while "headrace_generation 2.0" not in scrape(connect)[1]:
            assert time.monotonic() < end


def test_an_address_that_is_taken_is_told_once_and_when_it_is_free_again(model, runtime_dir):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with daemon_process(model, runtime_dir, "--metrics", f"127.0.0.1:{port}") as daemon:
            end = time.monotonic() + 30
            while "Address already in use" not in daemon.log.read_text():
                assert time.monotonic() < end
                time.sleep(0.05)
            assert sum("metrics: " in line for line in daemon.log.read_text().splitlines()) == 1
            holder.close()
            while f"metrics: served at 127.0.0.1:{port} now" not in daemon.log.read_text():
                assert time.monotonic() < end
                time.sleep(0.05)


def test_scrapers_that_say_nothing_keep_neither_the_others_nor_the_daemon(model, runtime_dir):
    path = runtime_dir / "m.sock"
    with daemon_process(model, runtime_dir, "--metrics", f"unix:{path}"):
        scrape(lambda: UnixConnection(path))
        silent = [UnixConnection(path) for _ in range(5)]
        for connection in silent:
            connection.connect()
        began = time.monotonic()
        status, text = scrape(lambda: UnixConnection(path))
        assert time.monotonic() - began < 3
        assert (status, found_samples(text)["headrace_stuck_clients",]) == (200, 0)
        for connection in silent:
            connection.close()


def test_without_being_asked_for_nothing_is_served(model, runtime_dir):
    with daemon_process(model, runtime_dir), ExpertClient(runtime_dir) as reader:
        assert reader.stats()["n_clients"] == 1
        assert not list(runtime_dir.glob("m.sock"))


def test_the_page_describes_every_metric_as_it_is():
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(headrace_\w+)` \| (\w+) \| (.*?) \| (.*) \|$", page, re.MULTILINE)
    assert [name for name, *_ in rows] == list(ALL_NAMES)
    told = {name: (kind, labels, text) for name, kind, labels, text in rows}
    for metric in METRICS:
        kind, labels, text = told[metric.shown_name]
        assert (kind, text) == (metric.kind, metric.help)
        for label, value in [pair for pairs, _ in metric.stats for pair in pairs]:
            assert f"`{label}`" in labels
            assert value in labels
    for used in re.findall(r"`[^`\n]*(headrace_\w+?)(?:_bucket)?[\[{ `]", page):
        assert used in ALL_NAMES, used


def test_names_follow_the_conventions():
    for metric in METRICS:
        assert re.fullmatch(r"headrace_[a-z_]+", metric.name)
        assert not metric.name.endswith("_total")
        assert "_ms" not in metric.name
        assert metric.kind in ("counter", "gauge")
        assert metric.help.endswith(".")
