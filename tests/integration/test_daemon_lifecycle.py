"""The real daemon as a process: starts, refusals to start, ends, deaths and successors."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from expert_daemon.config import DaemonConfig
from expert_daemon.daemon import Daemon
from protocol.arena.layout import SlotState
from protocol.errors import ConfigError, DaemonLost
from protocol.files.checkpoint import open_checkpoint
from protocol.wire import messages as m
from protocol.wire.client import ExpertClient
from protocol.wire.codec import encode
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.faulty_source import Faults
from tests.support.raw_client import RawClient, hello
from tests.support.running_daemon import (
    ROOT,
    DaemonProcess,
    daemon_process,
    daemon_thread,
    smallest_arena,
)
from tests.support.shard_bytes import expert_bytes, slot_bytes

pytestmark = pytest.mark.timeout(90)

N_LAYERS, N_EXPERTS, TOP_K = 6, 16, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    return write_fake_checkpoint(directory, n_layers=N_LAYERS, n_experts=N_EXPERTS, top_k=TOP_K)


@pytest.fixture(scope="module")
def checkpoint(model):
    return open_checkpoint(model)


@pytest.fixture
def daemon(model, runtime_dir):
    with daemon_process(model, runtime_dir) as started:
        yield started


def engine_of(runtime_dir, checkpoint, **options):
    return ExpertClient(runtime_dir, "engine", checkpoint.fingerprint, TOP_K, **options)


def load(engine, layer, experts):
    answer = engine.miss(layer, experts)
    engine.applied = answer.to_version
    assert answer.errors == ()
    return answer


def run_daemon(*arguments, environment=None):
    command = [sys.executable, "-m", "expert_daemon", *map(str, arguments)]
    return subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
        cwd=ROOT,
        env=environment or {**os.environ, "PYTHONPATH": str(ROOT)},
    )


# starting


def libraries_s():
    """How long a process takes here that imports the daemon's libraries and does nothing."""
    began = time.monotonic()
    command = [sys.executable, "-c", "import msgpack, numpy, uvloop, zmq"]
    subprocess.run(command, check=True, timeout=30)
    return time.monotonic() - began


@pytest.mark.timing
def test_the_demo_daemon_is_ready_within_a_second(demo_dir, runtime_dir):
    """On a slow processor in three times what its libraries take to be imported."""
    seconds, bare = [], []
    daemon = DaemonProcess(demo_dir, runtime_dir)
    try:
        for _ in range(5):  # the machine may be busy with other things
            bare.append(libraries_s())
            began = time.monotonic()
            daemon.start()
            seconds.append(time.monotonic() - began)
            if seconds[-1] < 1.0:
                break
            daemon.kill()
    finally:
        daemon.close()
    assert min(seconds) < max(1.0, 3 * min(bare)), (seconds, bare)


def test_the_daemon_imports_no_torch(runtime_dir, demo_dir):
    program = (
        "import sys\n"
        "from expert_daemon.__main__ import main\n"
        "from expert_daemon.daemon import Daemon\n"
        "begin = Daemon._begin\n"
        "Daemon._begin = lambda self, signals: (begin(self, signals), self.stop())\n"
        "status = main(sys.argv[1:])\n"
        "heavy = {'torch', 'triton', 'kernels', 'compute'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else status)\n"
    )
    flags = ["--model", demo_dir, "--runtime-dir", runtime_dir, "--state-dir", runtime_dir]
    result = subprocess.run(
        [sys.executable, "-c", program, *map(str, flags)],
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr


def test_an_arena_below_the_minimum_is_refused_with_each_addend(model, checkpoint, runtime_dir):
    smallest = smallest_arena(checkpoint, TOP_K)
    base = ("--model", model, "--runtime-dir", runtime_dir, "--state-dir", runtime_dir / "s")
    result = run_daemon(*base, "--arena", smallest - 1)
    assert result.returncode == 1
    for word in ("top-k x batch", "free pool", "hedged reads", "leases", "prefill window"):
        assert word in result.stderr
    assert f"smallest: {smallest} bytes" in result.stderr
    with daemon_process(model, runtime_dir, "--arena", str(smallest)) as daemon:
        with engine_of(runtime_dir, checkpoint) as engine:
            assert engine.stats()["arena_bytes"] <= smallest
            load(engine, 0, range(min(engine.welcome.max_experts, N_EXPERTS)))
        assert daemon.stop() == 0


def test_a_larger_batch_needs_a_larger_arena(model, checkpoint, runtime_dir):
    smallest = smallest_arena(checkpoint, TOP_K)
    base = ("--model", model, "--runtime-dir", runtime_dir, "--state-dir", runtime_dir / "s")
    result = run_daemon(*base, "--arena", smallest, "--batch", 8)
    assert result.returncode == 1
    assert "top-k x batch" in result.stderr


def test_a_second_daemon_is_refused_naming_the_first(daemon, model, checkpoint, runtime_dir):
    base = ("--model", model, "--runtime-dir", runtime_dir, "--state-dir", runtime_dir / "s")
    result = run_daemon(*base)
    assert result.returncode == 1
    assert f"another expert daemon (pid {daemon.pid}) runs in {runtime_dir}" in result.stderr
    assert "the arena of the last daemon" not in result.stderr  # it is the first's, which serves it
    with engine_of(runtime_dir, checkpoint) as engine:
        load(engine, 0, (1, 2))


def test_a_runtime_directory_too_long_for_a_socket_is_refused(model, tmp_path):
    long = tmp_path / ("x" * 120)
    result = run_daemon("--model", model, "--runtime-dir", long, "--state-dir", tmp_path)
    assert result.returncode == 1
    assert "a socket's path may have 100" in result.stderr
    assert not long.exists()


def test_a_directory_where_others_may_write_is_refused_before_an_arena_is_looked_for(
    model, runtime_dir
):
    runtime_dir.chmod(0o777)
    base = ("--model", model, "--runtime-dir", runtime_dir, "--state-dir", runtime_dir / "s")
    result = run_daemon(*base)
    assert result.returncode == 1
    assert "others may write there (mode 0777); wanted 0700" in result.stderr
    assert "a new, empty arena" not in result.stderr


def test_a_model_that_is_none_is_refused_by_name(runtime_dir, tmp_path):
    base = ("--runtime-dir", runtime_dir, "--state-dir", tmp_path)
    result = run_daemon("--model", tmp_path / "nothing", *base)
    assert result.returncode == 1
    assert "nothing" in result.stderr


def test_the_sockets_are_for_their_owner_only(daemon):
    for name in ("expertd.sock", "arena.sock", "expertd.lock"):
        assert (daemon.runtime_dir / name).stat().st_mode & 0o077 == 0


# ending


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_daemon_in_order_and_its_clients_are_told(
    daemon, checkpoint, runtime_dir, number
):
    engine = engine_of(runtime_dir, checkpoint)
    load(engine, 0, (1, 2))
    began = time.monotonic()
    assert daemon.stop(number) == 0
    assert time.monotonic() - began < 2
    with pytest.raises(DaemonLost):
        engine.miss(0, (1, 2))
    engine.close()
    assert daemon.log.read_text().splitlines()[-1] == "stopped"


@pytest.mark.timeout(30)
def test_a_log_that_nobody_reads_keeps_neither_the_daemon_nor_its_end(
    model, checkpoint, runtime_dir
):
    daemon = DaemonProcess(model, runtime_dir)
    os.mkfifo(daemon.log)
    reads = os.open(daemon.log, os.O_RDONLY | os.O_NONBLOCK)
    full = os.open(daemon.log, os.O_WRONLY | os.O_NONBLOCK)
    try:
        with contextlib.suppress(BlockingIOError):
            while os.write(full, bytes(4096)):
                pass
        daemon.start(timeout=5)
        with engine_of(runtime_dir, checkpoint) as engine:
            load(engine, 0, (1, 2))
        assert daemon.stop() == 0
    finally:
        os.close(reads)
        os.close(full)
        daemon.close()


def test_a_read_that_never_returns_does_not_keep_the_daemon(model, checkpoint, runtime_dir):
    faults = Faults(stuck=lambda *_: not faults.unstick.is_set())
    faults.unstick.set()
    with daemon_thread(model, runtime_dir, faults, read_threads=2) as daemon:
        faults.unstick.clear()
        with ExpertClient(runtime_dir) as reader:
            reader._connection.send(_fetch(reader, (0, 0)))
            reader.ping()
            began = time.monotonic()
            daemon.daemon.stop()
            daemon._thread.join(5)
            assert time.monotonic() - began < 3
            assert not daemon._thread.is_alive()


def _fetch(reader, *keys):
    from protocol.wire import messages as m

    return m.Fetch(reader._next_number(), keys, 5000)


# deaths


def test_a_successor_keeps_the_arena_and_reads_nothing_again(daemon, checkpoint, runtime_dir):
    engine = engine_of(runtime_dir, checkpoint)
    first = {layer: load(engine, layer, range(N_EXPERTS)) for layer in range(3)}
    arena_id, generation = engine.welcome.arena_id, engine.welcome.generation
    daemon.kill()
    with pytest.raises(DaemonLost):
        engine.miss(0, (1,))
    daemon.start()
    welcome = engine.reconnect()
    assert (welcome.arena_id, welcome.generation) == (arena_id, generation + 1)
    engine.applied = welcome.version
    table = np.frombuffer(welcome.table, "<i4").reshape(N_LAYERS, N_EXPERTS)
    for layer, answer in first.items():
        assert tuple(table[layer]) == answer.slots
        again = load(engine, layer, range(N_EXPERTS))
        assert again.slots == answer.slots
        assert again.n_bytes == 0
        for expert, slot in enumerate(again.slots):
            assert slot_bytes(engine, slot) == expert_bytes(checkpoint, layer, expert)
    stats = engine.stats()
    assert stats["bytes_read"] == 0
    assert stats["n_restored"] == 3 * N_EXPERTS
    engine.close()


def test_a_successor_that_is_handed_nothing_takes_the_arena_from_the_engine(
    daemon, checkpoint, runtime_dir
):
    engine = engine_of(runtime_dir, checkpoint)
    slots = load(engine, 0, range(N_EXPERTS)).slots
    arena_id = engine.welcome.arena_id
    daemon.kill()
    daemon._keep(-1)
    daemon.start()
    assert f"is taken from process {os.getpid()}, which holds it" in daemon.log.read_text()
    welcome = engine.reconnect()
    assert welcome.arena_id == arena_id
    engine.applied = welcome.version
    again = load(engine, 0, range(N_EXPERTS))
    assert (again.slots, again.n_bytes) == (slots, 0)
    assert daemon.arena >= 0  # a supervisor that lost it is handed it again
    engine.close()


def test_without_anybody_who_holds_the_arena_a_successor_starts_cold_and_says_so(
    daemon, checkpoint, runtime_dir
):
    with engine_of(runtime_dir, checkpoint) as engine:
        load(engine, 0, range(N_EXPERTS))
        arena_id = engine.welcome.arena_id
    daemon.kill()
    daemon._keep(-1)
    daemon.start()
    assert "a new, empty arena" in daemon.log.read_text()
    with engine_of(runtime_dir, checkpoint) as engine:
        assert engine.welcome.arena_id != arena_id
        assert load(engine, 0, range(N_EXPERTS)).n_bytes > 0


def test_the_bytes_of_replaced_shards_are_not_kept(checkpoint, runtime_dir, tmp_path):
    copy = write_fake_checkpoint(
        tmp_path / "copy", n_layers=N_LAYERS, n_experts=N_EXPERTS, top_k=TOP_K
    )
    other = write_fake_checkpoint(
        tmp_path / "other", seed=5, n_layers=N_LAYERS, n_experts=N_EXPERTS, top_k=TOP_K
    )
    assert open_checkpoint(copy).fingerprint == open_checkpoint(other).fingerprint
    with daemon_process(copy, runtime_dir) as daemon:
        with engine_of(runtime_dir, checkpoint) as engine:
            load(engine, 0, range(N_EXPERTS))
        daemon.stop()
        for path in copy.glob("*.safetensors"):
            path.write_bytes((other / path.name).read_bytes())
        daemon.start()
        assert "written to or replaced" in daemon.log.read_text()
        changed = open_checkpoint(copy)
        with engine_of(runtime_dir, checkpoint) as engine:
            engine.applied = engine.welcome.version
            answer = load(engine, 0, range(N_EXPERTS))
            assert answer.n_bytes > 0
            for expert, slot in enumerate(answer.slots):
                assert slot_bytes(engine, slot) == expert_bytes(changed, 0, expert)


INSTANTS = [
    pytest.param(5, marks=pytest.mark.slow),
    pytest.param(100, marks=[pytest.mark.accept, pytest.mark.timeout(900)]),
]


@pytest.mark.parametrize("n_kills", INSTANTS)
def test_killed_at_random_instants_the_daemon_loses_and_repeats_nothing(
    model, checkpoint, runtime_dir, n_kills
):
    rng = random.Random(n_kills)
    smallest = smallest_arena(checkpoint, TOP_K) + 30 * 4096
    flags = ("--arena", str(smallest), "--read-threads", "2")
    with daemon_process(model, runtime_dir, *flags) as daemon:
        engine = engine_of(runtime_dir, checkpoint)
        for _ in range(n_kills):
            end = time.monotonic() + rng.random() * 0.05
            requests = [
                (rng.randrange(N_LAYERS), sorted(rng.sample(range(N_EXPERTS), 6)))
                for _ in range(50)
            ]
            killer = _kill_at(daemon, end)
            try:
                for layer, experts in requests:
                    load(engine, layer, experts)
            except DaemonLost:
                pass
            killer.join()
            ready = _ready_slots(engine)
            daemon.start()
            welcome = engine.reconnect()
            engine.applied = welcome.version
            table = np.frombuffer(welcome.table, "<i4").reshape(N_LAYERS, N_EXPERTS)
            held = {(la, ex): int(table[la, ex]) for la, ex in np.argwhere(table >= 0)}
            assert set(ready.items()) <= set(held.items())
            assert len(set(held.values())) == len(held)
            for (layer, expert), slot in held.items():
                assert slot_bytes(engine, slot) == expert_bytes(checkpoint, layer, expert)
            if held:
                layer, expert = next(iter(held))
                assert load(engine, int(layer), [int(expert)]).n_bytes == 0
        for layer in range(N_LAYERS):
            answer = load(engine, layer, range(N_EXPERTS))
            for expert, slot in enumerate(answer.slots):
                assert slot_bytes(engine, slot) == expert_bytes(checkpoint, layer, expert)
        engine.close()


def _kill_at(daemon, end):
    import threading

    def work():
        time.sleep(max(0.0, end - time.monotonic()))
        daemon.kill()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def _ready_slots(engine):
    """(layer, expert) -> slot of what the headers of the dead daemon's arena call READY."""
    headers = engine.arena.headers[: engine.welcome.n_slots]
    slots = np.flatnonzero(headers["state"] == SlotState.READY)
    return {(int(headers["layer"][s]), int(headers["expert"][s])): int(s) for s in slots}


ENGINE = """
import sys, time
from pathlib import Path
from protocol.files.checkpoint import open_checkpoint
from protocol.wire.client import ExpertClient
checkpoint = open_checkpoint(Path(sys.argv[1]))
client = ExpertClient(sys.argv[2], "engine", checkpoint.fingerprint, int(sys.argv[3]))
while True:
    for layer in range(checkpoint.config.n_layers):
        answer = client.miss(layer, range(6))
        client.applied = answer.to_version
    print("round", flush=True)
"""


@pytest.mark.parametrize("n_kills", INSTANTS)
def test_after_the_engine_is_killed_the_next_one_finds_the_experts(
    daemon, model, checkpoint, runtime_dir, n_kills
):
    rng = random.Random(n_kills)
    command = [sys.executable, "-c", ENGINE, str(model), str(runtime_dir), str(TOP_K)]
    for _ in range(n_kills):
        child = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
        assert child.stdout is not None
        assert child.stdout.readline() == b"round\n"
        time.sleep(rng.random() * 0.02)
        child.kill()
        child.wait(10)
        child.stdout.close()
        began = time.monotonic()
        with engine_of(runtime_dir, checkpoint) as engine:
            assert time.monotonic() - began < 2
            engine.applied = engine.welcome.version
            for layer in range(N_LAYERS):
                answer = load(engine, layer, range(6))
                assert answer.n_bytes == 0
                for expert, slot in enumerate(answer.slots):
                    assert slot_bytes(engine, slot) == expert_bytes(checkpoint, layer, expert)


def test_while_an_engine_lives_without_its_daemon_no_other_takes_its_place(
    daemon, model, checkpoint, runtime_dir
):
    command = [sys.executable, "-c", ENGINE.replace("while True:", "for _ in range(1):")]
    command[-1] += "\ntime.sleep(60)\n"
    child = subprocess.Popen(
        [*command, str(model), str(runtime_dir), str(TOP_K)], stdout=subprocess.PIPE, cwd=ROOT
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"round\n"
    daemon.kill()
    daemon.start()
    from protocol.errors import DaemonBusy

    with RawClient(runtime_dir) as raw:  # claims to be that process, and to have done
        engine = {"role": "engine", "fingerprint": checkpoint.fingerprint, "top_k_batch": TOP_K}
        welcome = raw.ask(hello(**engine, pid=child.pid))
        raw.send(encode(m.Bye(), welcome.session, welcome.generation))
        assert raw.ask(encode(m.Stats(1), 0, 0)).reason == "hello_first"
    with pytest.raises(DaemonBusy, match=str(child.pid)):
        engine_of(runtime_dir, checkpoint, hello_ms=300)
    child.kill()
    child.wait(10)
    child.stdout.close()
    with engine_of(runtime_dir, checkpoint, hello_ms=5000) as engine:
        engine.applied = engine.welcome.version
        assert load(engine, 0, range(6)).n_bytes == 0


# arenas that do not fit


def test_the_arena_of_another_model_is_initialised_again_in_place(
    daemon, checkpoint, runtime_dir, tmp_path
):
    engine = engine_of(runtime_dir, checkpoint)
    load(engine, 0, range(N_EXPERTS))
    arena_id = engine.welcome.arena_id
    engine.close()
    assert daemon.stop() == 0
    inode = os.fstat(daemon.arena).st_ino
    other_dir = write_fake_checkpoint(
        tmp_path / "other", seed=2, n_layers=N_LAYERS, n_experts=N_EXPERTS - 4, top_k=TOP_K
    )
    other = open_checkpoint(other_dir)
    daemon._command[daemon._command.index("--model") + 1] = str(other_dir)
    daemon.start()
    assert os.fstat(daemon.arena).st_ino == inode
    with engine_of(runtime_dir, other) as engine:
        assert engine.welcome.arena_id != arena_id
        assert engine.welcome.generation == 2
        answer = load(engine, 0, range(4))
        for expert, slot in enumerate(answer.slots):
            assert slot_bytes(engine, slot) == expert_bytes(other, 0, expert)
    assert "initialised again" in daemon.log.read_text()


def test_an_arena_that_is_too_small_is_given_up(daemon, checkpoint, runtime_dir, tmp_path):
    assert daemon.stop() == 0
    inode = os.fstat(daemon.arena).st_ino
    larger = write_fake_checkpoint(
        tmp_path / "larger", n_layers=N_LAYERS, n_experts=64, top_k=TOP_K
    )
    daemon._command[daemon._command.index("--model") + 1] = str(larger)
    daemon.start()
    assert os.fstat(daemon.arena).st_ino != inode
    assert "given up" in daemon.log.read_text()


def test_what_is_passed_on_under_the_arenas_name_but_is_none_is_given_up(model, runtime_dir):
    daemon = DaemonProcess(model, runtime_dir)
    daemon.arena = os.memfd_create("no arena")
    try:
        daemon.start()
        assert "given up" in daemon.log.read_text()
    finally:
        daemon.close()


def test_an_arena_may_grow_at_a_restart_and_keeps_its_experts(model, checkpoint, runtime_dir):
    smallest = smallest_arena(checkpoint, TOP_K)
    largest = ("--arena-max", str(smallest + (1 << 20)))
    small = ("--arena", str(smallest + (1 << 18)))
    with daemon_process(model, runtime_dir, *small, *largest) as daemon:
        with engine_of(runtime_dir, checkpoint) as engine:
            n_slots = engine.welcome.n_slots
            slots = load(engine, 0, range(8)).slots
        daemon.stop()
        at = daemon._command.index("--arena") + 1
        daemon._command[at] = str(smallest + (1 << 19))
        daemon.start()
        with engine_of(runtime_dir, checkpoint) as engine:
            assert engine.welcome.n_slots > n_slots
            engine.applied = engine.welcome.version
            again = load(engine, 0, range(8))
            assert (again.slots, again.n_bytes) == (slots, 0)


def test_a_size_that_nobody_gave_stays_what_it_was(model, checkpoint, runtime_dir):
    smallest = smallest_arena(checkpoint, TOP_K)
    with daemon_process(model, runtime_dir, "--arena", str(smallest + (1 << 16))) as daemon:
        with engine_of(runtime_dir, checkpoint) as engine:
            arena_id, n_slots = engine.welcome.arena_id, engine.welcome.n_slots
        daemon.stop()
        at = daemon._command.index("--arena")
        del daemon._command[at : at + 2]
        daemon.start()
        with engine_of(runtime_dir, checkpoint) as engine:
            assert (engine.welcome.arena_id, engine.welcome.n_slots) == (arena_id, n_slots)


def test_more_memory_than_is_available_is_refused(model, runtime_dir, monkeypatch):
    monkeypatch.setattr("expert_daemon.arena.available_bytes", lambda: 100_000)
    settings = {"runtime_dir": runtime_dir, "state_dir": runtime_dir, "arena_bytes": 1 << 20}
    with pytest.raises(ConfigError, match=r"97\.7 KiB of memory"):
        Daemon(DaemonConfig(model=str(model), **settings))


def test_memory_that_cannot_be_populated_is_refused(model, runtime_dir, monkeypatch):
    monkeypatch.setattr("expert_daemon.populate._populate_span", lambda *_: 12)
    with pytest.raises(ConfigError, match="Cannot allocate memory"):
        Daemon(DaemonConfig(model=str(model), runtime_dir=runtime_dir, state_dir=Path("/tmp")))
