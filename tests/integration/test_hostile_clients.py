"""Clients that stop, flood or send garbage, and the others beside them."""

from __future__ import annotations

import contextlib
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq

from protocol.errors import DaemonBusy
from protocol.files.checkpoint import open_checkpoint
from protocol.wire import messages as m
from protocol.wire.client import ExpertClient
from protocol.wire.codec import encode
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.raw_client import RawClient, hello
from tests.support.running_daemon import ROOT, daemon_process, daemon_thread
from tests.support.shard_bytes import expert_bytes, slot_bytes

pytestmark = pytest.mark.timeout(60)

N_LAYERS, N_EXPERTS, TOP_K = 6, 16, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    return write_fake_checkpoint(directory, n_layers=N_LAYERS, n_experts=N_EXPERTS, top_k=TOP_K)


@pytest.fixture(scope="module")
def checkpoint(model):
    return open_checkpoint(model)


def engine_of(runtime_dir, checkpoint, **options):
    return ExpertClient(runtime_dir, "engine", checkpoint.fingerprint, TOP_K, **options)


def load(engine, layer, experts):
    answer = engine.miss(layer, experts)
    engine.applied = answer.to_version
    assert answer.errors == ()
    return answer


def test_a_stopped_engine_is_shown_as_stuck_and_keeps_its_slots(
    model, checkpoint, runtime_dir, monkeypatch
):
    monkeypatch.setattr("expert_daemon.liveness.SILENT_S", 0.1)
    monkeypatch.setattr("expert_daemon.liveness.STUCK_S", 0.2)
    monkeypatch.setattr("expert_daemon.server.TICK_S", 0.02)
    with (
        daemon_thread(model, runtime_dir),
        engine_of(runtime_dir, checkpoint) as engine,
        ExpertClient(runtime_dir) as reader,
    ):
        slots = load(engine, 2, range(8)).slots
        end = time.monotonic() + 10
        while not reader.stats()["stuck"]:
            assert time.monotonic() < end
            time.sleep(0.02)
        stats = reader.stats()
        assert stats["stuck"].startswith("engine ")
        assert (stats["stuck_clients"], stats["n_clients"]) == (1, 2)
        with pytest.raises(DaemonBusy):
            engine_of(runtime_dir, checkpoint, hello_ms=100)
        for expert, slot in enumerate(slots):
            assert slot_bytes(engine, slot) == expert_bytes(checkpoint, 2, expert)
        engine.poll()  # answers the Ping
        end = time.monotonic() + 10
        while reader.stats()["stuck"]:
            engine.poll()
            assert time.monotonic() < end
        assert load(engine, 2, range(8)).slots == slots


@pytest.mark.parametrize("kind", ["refused", "answered", "begins again"])
def test_who_never_reads_is_dropped_and_nobody_waits_for_it(model, runtime_dir, monkeypatch, kind):
    """Whatever it sends: what waits for it is bounded, and the loop, which serves all, goes on."""
    monkeypatch.setattr("protocol.wire.sockets.SEND_HIGH_WATER", 8)
    monkeypatch.setattr("protocol.wire.replies.MOST_WAITING_BYTES", 10_000)
    with (
        daemon_thread(model, runtime_dir),
        ExpertClient(runtime_dir) as reader,
        RawClient(runtime_dir) as deaf,
    ):
        deaf.socket.rcvhwm = 1
        welcome = deaf.ask(hello())
        frames = {
            "refused": encode(m.Touch(0, b""), welcome.session, welcome.generation),
            "answered": encode(m.Stats(1), welcome.session, welcome.generation),
            "begins again": hello(),
        }
        began = time.monotonic()
        while (stats := reader.stats())["clients_dropped"] < (40 if "again" in kind else 1):
            assert time.monotonic() < began + 20, stats
            for _ in range(200):
                with contextlib.suppress(zmq.Again):
                    deaf.socket.send(frames[kind], zmq.NOBLOCK)


def test_who_reads_late_gets_every_answer_in_order(model, runtime_dir, monkeypatch):
    monkeypatch.setattr("protocol.wire.sockets.SEND_HIGH_WATER", 16)
    monkeypatch.setattr("protocol.wire.replies.DEAF_MS", 60_000)  # the machine may be busy
    n_asked = 300
    with (
        daemon_thread(model, runtime_dir),
        ExpertClient(runtime_dir) as reader,
        RawClient(runtime_dir) as late,
    ):
        late.socket.rcvhwm = 1
        welcome = late.ask(hello())
        for number in range(1, n_asked):
            late.socket.send(encode(m.Stats(number), welcome.session, welcome.generation))
        late.socket.send(encode(m.Ping(n_asked), welcome.session, welcome.generation))
        before = reader.stats()
        assert [late.answer().request for _ in range(n_asked)] == list(range(1, n_asked + 1))
        assert not before["clients_dropped"]
        assert not reader.stats()["clients_dropped"]


def n_descriptors(pid):
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


WITH_FEW_DESCRIPTORS = """
import resource, runpy
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, ({}, hard))
runpy.run_module("expert_daemon", run_name="__main__", alter_sys=True)
"""


def test_silent_connections_beyond_the_usual_limit_end_no_daemon_and_are_dropped(
    model, runtime_dir
):
    """ZeroMQ aborts its process where it cannot accept for want of a descriptor."""
    few = 128
    n_silent = 3 * few
    program = ("-c", WITH_FEW_DESCRIPTORS.format(few))
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(daemon_process(model, runtime_dir, program=program))
        reader = stack.enter_context(ExpertClient(runtime_dir))
        began = n_descriptors(daemon.pid)
        for _ in range(n_silent):
            silent = stack.enter_context(socket.socket(socket.AF_UNIX))
            silent.connect(str(runtime_dir / "expertd.sock"))
        reader.ping(5000)
        ends = time.monotonic() + 15
        while n_descriptors(daemon.pid) > began + few:
            assert time.monotonic() < ends
            time.sleep(0.1)
        reader.ping(5000)
        assert daemon.is_alive


# a crowd, one of whom is malicious

N_CLIENTS = 24
RATE = 1500  # messages a second of the 24th client, honest or not

OTHER = """
import os, random, socket, sys, time
import zmq
from protocol.wire import messages as m
from protocol.wire.codec import encode, decode
from tests.support.raw_client import RawClient, hello
from pathlib import Path
runtime_dir, kind, rate = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
chance = random.Random(1)
idle = []
def dealer(hwm=64):
    client = RawClient(runtime_dir)
    client.socket.rcvhwm = client.socket.sndhwm = hwm
    return client
honest = dealer()
welcome = honest.ask(hello())
ping = lambda n: encode(m.Ping(n), welcome.session, welcome.generation)
stats = lambda n: encode(m.Stats(n), welcome.session, welcome.generation)
# Made beforehand: what its making takes of the processors is no cost of the daemon's.
made = [chance.randbytes(size) for size in (0, 1, 20, 300, 5000, 200_000) for _ in range(8)]
def garbage():
    return chance.choice(made)
strange = [
    lambda: encode(m.Hello((9, 9), "engine", b"x" * 16, b"", 1, 1)),
    lambda: encode(m.Stats(1), 10**6, welcome.generation),
    lambda: encode(m.MissRequest(1, 0, 0, (1,), (), 0, 0), welcome.session, welcome.generation),
    garbage, garbage, garbage,
]
deaf = [dealer(1) for _ in range(3)]
print("up", flush=True)
number, began = 1, time.monotonic()
while True:
    number += 1
    if kind == "honest":
        honest.ask(ping(number), 5000)
    else:
        try:
            if number % 3 == 0:
                deaf[number % 3].socket.send(stats(number), zmq.NOBLOCK)
            else:
                honest.socket.send(chance.choice(strange)(), zmq.NOBLOCK)
        except zmq.Again:
            pass
        if number % 50 == 0:
            half = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                half.connect(str(runtime_dir / "arena.sock"))
                half.send(chance.randbytes(chance.randrange(1, 30)))
            except OSError:
                pass
            idle.append(half)
            del idle[:-20]
    time.sleep(max(0.0, began + number / rate - time.monotonic()))
"""


@contextlib.contextmanager
def the_other(runtime_dir, kind):
    """The 24th client, in a process of its own."""
    child = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(runtime_dir), kind, str(RATE)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        yield
        assert child.poll() is None
    finally:
        child.kill()
        child.wait(10)
        if child.stdout is not None:
            child.stdout.close()


LEAST_S = 0.25  # of a round: on a quick machine its pings end before a flood is one


def p99_of(clients, n_pings):
    """99th percentile [ms] of the honest ones' round trips, each in its turn."""
    times = [clients[number % len(clients)].ping(5000) for number in range(n_pings)]
    return sorted(times)[int(0.99 * len(times))]


def resident_bytes(pid):
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


@pytest.mark.timing
@pytest.mark.parametrize(
    ("n_rounds", "n_pings"),
    [
        pytest.param(3, 400, marks=pytest.mark.slow),
        pytest.param(15, 4000, marks=[pytest.mark.accept, pytest.mark.timeout(900)]),
    ],
)
def test_one_malicious_client_of_24_costs_the_others_no_more_than_an_honest_one(
    model, runtime_dir, n_rounds, n_pings
):
    with daemon_process(model, runtime_dir) as daemon, contextlib.ExitStack() as crowd:
        clients = [crowd.enter_context(ExpertClient(runtime_dir)) for _ in range(N_CLIENTS - 1)]
        tries = []
        for _ in range(3):  # the machine may be busy with other things
            found, memory = crowded(daemon, clients, n_rounds, n_pings)
            honest, malicious = (statistics.median(found[kind]) for kind in found)
            tries.append(found)
            if malicious < 2 * honest:
                break
        assert malicious < 2 * honest, tries
        assert memory[-1] - memory[1] < 8 << 20, memory
        refused = clients[0].stats()["frames_refused"]
        assert refused > n_rounds * 100
        assert daemon.is_alive


def crowded(daemon, clients, n_rounds, n_pings):
    """The honest ones' p99 [ms] beside an honest and a malicious 24th, and the daemon's memory."""
    found: dict[str, list[float]] = {"honest": [], "malicious": []}
    memory = []
    for _ in range(n_rounds):
        for kind, p99s in found.items():
            with the_other(daemon.runtime_dir, kind):
                ends = time.monotonic() + LEAST_S
                p99s.append(p99_of(clients, n_pings))
                time.sleep(max(0.0, ends - time.monotonic()))
        memory.append(resident_bytes(daemon.pid))
    return found, memory
