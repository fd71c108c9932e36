"""Fixed traces, garbage and floods against the real daemon: what it reads, holds and survives."""

from __future__ import annotations

import os
import random
import time

import numpy as np
import pytest

from protocol.files.checkpoint import open_checkpoint
from protocol.wire import messages as m
from protocol.wire.client import ExpertClient
from protocol.wire.codec import encode
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.frames import bad_frames
from tests.support.raw_client import RawClient
from tests.support.running_daemon import daemon_process, daemon_thread, smallest_arena
from tests.support.shard_bytes import expert_bytes, slot_bytes

pytestmark = pytest.mark.timeout(90)

N_LAYERS, N_EXPERTS, TOP_K = 5, 24, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    return write_fake_checkpoint(directory, n_layers=N_LAYERS, n_experts=N_EXPERTS, top_k=TOP_K)


@pytest.fixture(scope="module")
def checkpoint(model):
    return open_checkpoint(model)


def engine_of(runtime_dir, checkpoint):
    return ExpertClient(runtime_dir, "engine", checkpoint.fingerprint, TOP_K)


def load(engine, layer, experts):
    answer = engine.miss(layer, experts)
    engine.applied = answer.to_version
    assert answer.errors == ()
    return answer


def trace(n_steps, experts):
    """Zipf-like picks: (layer, experts) of each step, always the same."""
    rng = np.random.default_rng(9)
    weights = 1.0 / (1 + np.arange(len(experts)))
    weights /= weights.sum()
    return [
        [
            (layer, sorted(rng.choice(experts, TOP_K, replace=False, p=weights).tolist()))
            for layer in range(N_LAYERS)
        ]
        for _ in range(n_steps)
    ]


def play(engine, steps, first_step=0):
    """Bytes read for a trace."""
    n_bytes = 0
    for number, picks in enumerate(steps):
        for layer, experts in picks:
            n_bytes += engine.miss(layer, experts, step=first_step + number).n_bytes
            engine.applied = max(engine.applied, 0)
        apply(engine)
    return n_bytes


def apply(engine):
    """Take what was pushed, as an engine does between steps."""
    version = int(engine.arena.table_version[0])
    engine.changes()
    engine.ack(version)


@pytest.mark.parametrize("policy", ["lfu-da", "lru"])
def test_bytes_read_fall_as_the_arena_grows_and_the_second_pass_has_hits(
    model, checkpoint, tmp_path, policy
):
    smallest = smallest_arena(checkpoint, TOP_K)
    steps = trace(40, range(N_EXPERTS))
    read = []
    for number, extra in enumerate((0, 30, 130)):
        directory = tmp_path / f"r{number}"
        settings = {"arena_bytes": smallest + extra * 4096, "policy": policy}
        with daemon_thread(model, directory, **settings), engine_of(directory, checkpoint) as e:
            first = play(e, steps)
            second = play(e, steps, 40)
            assert second < first
            assert e.stats()["n_hits"] > 0
            read.append(first + second)
    assert read[0] > read[1] > read[2]
    size = len(expert_bytes(checkpoint, 0, 0))
    distinct = {(layer, expert) for picks in steps for layer, ex in picks for expert in ex}
    assert read[2] == len(distinct) * size


def test_disjoint_traces_never_push_memory_past_the_cap(model, checkpoint, runtime_dir):
    smallest = smallest_arena(checkpoint, TOP_K)
    started = daemon_process(model, runtime_dir, "--arena", str(smallest))
    with started as daemon, engine_of(runtime_dir, checkpoint) as engine:
        for first in range(0, N_EXPERTS, 4):
            play(engine, trace(5, range(first, first + 4)))
            assert os.fstat(daemon.arena).st_blocks * 512 <= smallest
        slots = engine.keys()["slot"]
        assert len(set(slots.tolist())) == len(slots)
        assert len(slots) <= engine.welcome.n_slots


def test_a_key_assigned_evicted_and_assigned_again_ends_in_the_last_state(
    model, checkpoint, runtime_dir
):
    smallest = smallest_arena(checkpoint, TOP_K)
    started = daemon_process(model, runtime_dir, "--arena", str(smallest))
    with started, engine_of(runtime_dir, checkpoint) as engine:
        table = np.full((N_LAYERS, N_EXPERTS), -1)
        chance = random.Random(2)
        for step in range(60):
            layer = chance.randrange(N_LAYERS)
            experts = sorted(chance.sample(range(N_EXPERTS), 12))
            for pushed in engine.changes():
                if pushed.from_version <= engine.applied < pushed.to_version:
                    _apply(table, pushed.changes)
                    engine.applied = pushed.to_version
            answer = engine.miss(layer, experts, step=step)
            assert answer.from_version <= engine.applied or not answer.changes
            _apply(table, answer.changes)
            engine.applied = max(engine.applied, answer.to_version)
            for expert, slot in zip(experts, answer.slots, strict=True):
                assert table[layer, expert] == slot
                assert slot_bytes(engine, slot) == expert_bytes(checkpoint, layer, expert)
        welcome = engine.resync()
        found = np.frombuffer(welcome.table, "<i4").reshape(table.shape)
        assert (found == table).all()


def _apply(table, changes):
    for layer, expert, slot in changes:
        table[layer, expert] = slot


def test_ten_thousand_bad_frames_are_refused_and_the_daemon_goes_on(model, checkpoint, runtime_dir):
    with (
        daemon_process(model, runtime_dir) as daemon,
        ExpertClient(runtime_dir) as reader,
        RawClient(runtime_dir) as raw,
    ):
        n_refused = 0
        for number, frame in enumerate(bad_frames(10_000, seed=4)):
            raw.send(*([frame, b"more"] if number % 50 == 0 else [frame]))
            while (answer := raw.answer(0 if number % 100 else 20)) is not None:
                assert isinstance(answer, m.Refused)
                n_refused += 1
            if number % 1000 == 0:
                reader.release(reader.fetch([(1, number // 1000)]))
        while (answer := raw.answer(200)) is not None:
            assert isinstance(answer, m.Refused)
            n_refused += 1
        over_the_codecs_limit = raw.ask(b"\x93" * (2 << 20))
        assert over_the_codecs_limit.reason == "malformed"
        raw.send(b"\x00" * (17 << 20))  # over the socket's: the connection drops
        assert reader.ping() < 1000
        assert daemon.is_alive
        stats = reader.stats()
        assert stats["frames_refused"] >= n_refused > 5000
        assert len(daemon.log.read_text().splitlines()) < 100


def test_garbage_on_the_descriptor_socket_harms_nobody(model, checkpoint, runtime_dir):
    import socket

    chance = random.Random(1)
    with daemon_process(model, runtime_dir), ExpertClient(runtime_dir) as reader:
        for number in range(300):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
                raw.connect(str(runtime_dir / "arena.sock"))
                if number % 3:
                    raw.send(chance.randbytes(chance.choice([1, 20, 28, 28, 200])))
                    raw.settimeout(5)
                    assert raw.recv(300)
        reader.release(reader.fetch([(0, 0)]))


def test_a_session_of_ours_cannot_be_used_from_another_route(model, checkpoint, runtime_dir):
    with (
        daemon_process(model, runtime_dir),
        ExpertClient(runtime_dir) as reader,
        RawClient(runtime_dir) as raw,
    ):
        session, generation = reader.welcome.session, reader.welcome.generation
        assert raw.ask(encode(m.Bye(), session, generation)).reason == "hello_first"
        assert reader.ping() < 1000


class Whim:
    """Random messages that the codec lets through, good sense or none."""

    def __init__(self, seed, welcome):
        self.chance = random.Random(seed)
        self.welcome = welcome

    def number(self):
        return self.chance.choice([1, 2, 3, self.chance.randrange(1, 1 << 40)])

    def version(self):
        return self.chance.choice([0, 1, 5, 50, 1 << 50])

    def layer(self):
        return self.chance.randrange(N_LAYERS)

    def experts(self):
        found = self.chance.sample(range(N_EXPERTS), self.chance.randrange(1, N_EXPERTS))
        return tuple(sorted(found))

    def slots(self):
        n_slots = self.welcome.n_slots
        return tuple(sorted(self.chance.sample(range(n_slots), self.chance.randrange(n_slots))))

    def keys(self):
        return tuple((self.layer(), expert) for expert in self.experts())

    def picks(self):
        pairs = sorted({(self.layer(), expert) for expert in self.experts()})
        return np.array(pairs, "<u2").tobytes()

    def message(self):
        chance, number, version = self.chance, self.number(), self.version()
        leases = tuple((slot, chance.randrange(9)) for slot in self.slots())
        rows = np.array([chance.randrange(1 << 9) for _ in range(chance.randrange(1, 9))], "<u4")
        return chance.choice(
            [
                m.MissRequest(number, 1, self.layer(), self.experts(), self.slots(), version, 0),
                m.MissRequest(number, 1, self.layer(), self.experts(), (), 0, 0),
                m.MissRequest(number + 1, 2, self.layer(), self.experts()[:4], (), 0, 0),
                m.Stream(number, 0, self.layer(), self.experts(), 4, version, 0),
                m.Consumed(number, 3),
                m.Cancel(number),
                m.Ack(version, chance.randrange(1 << 40)),
                m.Resync(version),
                m.Touch(number, self.picks()),
                m.Hint(0, self.layer(), self.experts()),
                m.Warm(self.picks()),
                m.Fetch(number, self.keys()[:8], chance.choice([0, 1, 50])),
                m.Release(leases or ((0, 0),)),
                m.RowRequest(number, chance.randrange(2), rows.tobytes()),
                m.RowsDone(number),
                m.Keys(number),
                m.Stats(number),
                m.Resize(number, 1 << 30),
                m.Dropped((1, 2)),
                m.Unquarantine(number, self.keys()[:3]),
                m.Trace(number, "x", True),
                m.Ping(number),
                m.Pong(number),
            ]
        )


@pytest.mark.parametrize("role", ["engine", "reader"])
def test_senseless_messages_within_a_session_harm_nobody(model, checkpoint, runtime_dir, role):
    smallest = smallest_arena(checkpoint, TOP_K)
    with (
        daemon_thread(model, runtime_dir, arena_bytes=smallest) as daemon,
        ExpertClient(runtime_dir, role, checkpoint.fingerprint) as odd,
        ExpertClient(runtime_dir) as reader,
    ):
        whim = Whim(3, odd.welcome)
        connection = odd._connection
        for number in range(3000):
            connection.send(whim.message())
            while connection._dealer.poll(0):
                connection._dealer.recv()
            if number % 20 == 0:  # else a busy machine lets its answers pile up, and it is dropped
                reader.ping(10_000)
        reader.ping(10_000)
        assert not reader.stats()["clients_dropped"]
        daemon.daemon.cache.check()
        # While it is there it may hold every lease, or keep slots that it never acknowledges.
        odd.close()
        for key in ((0, 0), (4, 23)):
            lease = reader.fetch([key])[0]
            assert slot_bytes(reader, lease.slot) == expert_bytes(checkpoint, *key)
            reader.release([lease])
        # What it had asked to be loaded when idle is loaded, or given up, and ends.
        end = time.monotonic() + 20
        while daemon.daemon.cache.n_loading and time.monotonic() < end:
            reader.ping(5_000)
            time.sleep(0.01)
        assert daemon.daemon.cache.n_loading == 0
