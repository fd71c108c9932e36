"""kill -9 of the daemon, of the engine and of both at random instants, under load.

The test plays the supervisor that keeps the arena. After each kill it looks into the arena itself:
every READY slot holds its shard's bytes, no key stands in two slots; and whoever comes next finds
all of it, reads nothing again that was read whole, and gets every slot back.
"""

from __future__ import annotations

import mmap
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from expert_daemon.checksums import slot_checksum
from protocol.arena.identity import read_identity
from protocol.arena.layout import ArenaView, SlotState
from protocol.files.checkpoint import Checkpoint, open_checkpoint
from protocol.wire.client import ExpertClient
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.running_daemon import ROOT, DaemonProcess, daemon_process, smallest_arena
from tests.support.shard_bytes import expert_bytes, slot_bytes

N_LAYERS, N_EXPERTS, TOP_K = 6, 16, 2

LOAD = """
import random, sys
from pathlib import Path
from protocol.errors import DaemonLost
from protocol.files.checkpoint import open_checkpoint
from protocol.wire.client import ExpertClient
checkpoint = open_checkpoint(Path(sys.argv[1]))
chance = random.Random(int(sys.argv[3]))
config = checkpoint.config
def fresh():
    client.applied = client.welcome.version
with ExpertClient(sys.argv[2], "engine", checkpoint.fingerprint, config.top_k) as client:
    fresh()
    print("up", flush=True)
    while True:
        try:
            layer = chance.randrange(config.n_layers)
            experts = sorted(chance.sample(range(config.n_experts), chance.randrange(1, 9)))
            client.applied = client.miss(layer, experts).to_version
            for changes in client.changes():
                if changes.from_version <= client.applied < changes.to_version:
                    client.applied = changes.to_version
            client.ack(client.applied)
        except DaemonLost:
            client.reconnect(20000)
            fresh()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    return write_fake_checkpoint(directory, n_layers=N_LAYERS, n_experts=N_EXPERTS, top_k=TOP_K)


@pytest.fixture(scope="module")
def checkpoint(model: Path) -> Checkpoint:
    return open_checkpoint(model)


@contextmanager
def engine_process(model: Path, runtime_dir: Path, seed: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that misses at random, for ever."""
    command = [sys.executable, "-c", LOAD, str(model), str(runtime_dir), str(seed)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        yield child
    finally:
        child.kill()
        child.wait(10)
        if child.stdout is not None:
            child.stdout.close()


def ready_slots(arena: int, checkpoint: Checkpoint) -> dict[tuple[int, int], int]:
    """What the arena calls READY, every byte of it checked."""
    found: dict[tuple[int, int], int] = {}
    with mmap.mmap(arena, 0, prot=mmap.PROT_READ) as memory:
        identity = read_identity(memory)
        view = ArenaView(memory, identity.layout)
        layout = identity.layout
        pieces = list(zip(layout.piece_offsets, layout.piece_bytes, strict=True))
        for slot in range(identity.n_slots):
            header = view.headers[slot].copy()
            if header["state"] != SlotState.READY:
                continue
            key = (int(header["layer"]), int(header["expert"]))
            content = np.frombuffer(bytes(view.slot(slot)), np.uint8)
            if int(view.headers[slot]["generation"]) != int(header["generation"]):
                continue  # a daemon that lives has taken it meanwhile
            assert slot_checksum(content, pieces) == int(header["checksum"]), key
            whole = b"".join(content[o : o + n].tobytes() for o, n in pieces)
            assert whole == expert_bytes(checkpoint, *key), key
            assert key not in found, f"{key} in slots {found[key]} and {slot}"
            found[key] = slot
        del view, header
    return found


def check_next(
    daemon: DaemonProcess, checkpoint: Checkpoint, ready: dict[tuple[int, int], int]
) -> None:
    """The next engine finds what was READY, reads none of it again, and loses no slot."""
    with ExpertClient(
        daemon.runtime_dir, "engine", checkpoint.fingerprint, TOP_K, hello_ms=10_000
    ) as engine:
        engine.applied = engine.welcome.version
        n_slots = engine.welcome.n_slots
        held = {(int(la), int(ex)): int(slot) for la, ex, slot in engine.keys().tolist()}
        assert set(ready.items()) <= set(held.items())
        assert len(set(held.values())) == len(held)
        for layer in range(N_LAYERS):
            experts = sorted(ex for la, ex in ready if la == layer)
            for first in range(0, len(experts), 8):
                answer = engine.miss(layer, experts[first : first + 8])
                assert (answer.errors, answer.n_bytes) == ((), 0)
                engine.applied = answer.to_version
        _check_no_slot_is_lost(engine, n_slots)
        layer = len(ready) % N_LAYERS
        answer = engine.miss(layer, range(8))
        assert answer.errors == ()
        for expert, slot in enumerate(answer.slots):
            assert slot_bytes(engine, slot) == expert_bytes(checkpoint, layer, expert)


def _check_no_slot_is_lost(engine: ExpertClient, n_slots: int) -> None:
    end = time.monotonic() + 10
    while True:
        for changes in engine.changes():
            engine.applied = max(engine.applied, changes.to_version)
        engine.ack(engine.applied)
        engine.ping()
        states = engine.arena.headers["state"][:n_slots].tolist()
        if all(state in (SlotState.FREE, SlotState.READY) for state in states):
            return
        assert time.monotonic() < end, states
        time.sleep(0.005)


def wait_until_noticed(runtime_dir: Path) -> None:
    """Until the daemon has nothing left to do for an engine that is gone."""
    end = time.monotonic() + 10
    with ExpertClient(runtime_dir) as reader:
        while True:
            stats = reader.stats()
            if not stats["engine_pid"] and not stats["n_loading"]:
                return
            assert time.monotonic() < end, stats
            time.sleep(0.005)


def kill_at_instants(
    model: Path, checkpoint: Checkpoint, runtime_dir: Path, whom: str, n_kills: int
) -> None:
    chance = random.Random(f"{whom} {n_kills}")
    arena = smallest_arena(checkpoint, TOP_K) + 24 * 4096
    flags = ("--arena", str(arena), "--read-threads", "2")
    with daemon_process(model, runtime_dir, *flags) as daemon:
        for number in range(n_kills):
            with engine_process(model, runtime_dir, number) as engine:
                time.sleep(chance.random() * 0.1)
                if whom in ("daemon", "both"):
                    daemon.kill()
                if whom in ("engine", "both"):
                    engine.kill()
                    engine.wait(10)
                if whom == "engine":
                    wait_until_noticed(runtime_dir)
                ready = ready_slots(daemon.arena, checkpoint)
                if whom != "engine":
                    daemon.start()
                if whom == "daemon":  # the engine is back, too, and goes on
                    time.sleep(0.05)
                    assert engine.poll() is None
                    ready = {}
            check_next(daemon, checkpoint, ready)
        assert daemon.is_alive
        log = daemon.log.read_text()
        assert "hashing" in log
        assert "is damaged" not in log


INSTANTS = [
    pytest.param(10, marks=[pytest.mark.slow, pytest.mark.timeout(120)]),
    pytest.param(200, marks=[pytest.mark.accept, pytest.mark.timeout(1800)]),
]


@pytest.mark.parametrize("n_kills", INSTANTS)
@pytest.mark.parametrize("whom", ["daemon", "engine", "both"])
def test_after_a_kill_nothing_is_wrong_lost_twice_or_read_again(
    model: Path, checkpoint: Checkpoint, runtime_dir: Path, whom: str, n_kills: int
) -> None:
    kill_at_instants(model, checkpoint, runtime_dir, whom, n_kills)
