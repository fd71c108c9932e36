"""The real daemon and drives that fail: wrong bytes, slow reads, reads that never return."""

from __future__ import annotations

import contextlib
import random
import threading
import time

import pytest

from expert_daemon.log import flush
from protocol.errors import ShardError
from protocol.files.checkpoint import open_checkpoint
from protocol.wire.client import ExpertClient
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.faulty_source import Faults, overlaps
from tests.support.packing import pack
from tests.support.running_daemon import daemon_thread, smallest_arena
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


def of_expert(checkpoint, layer, expert):
    """A rule that strikes every read of one expert."""
    places = [
        overlaps(checkpoint.shards.index(one.shard), one.offset, one.n_bytes)
        for one in checkpoint.slice_map.slices(layer, expert)
        if one.n_bytes
    ]
    return lambda *read: any(place(*read) for place in places)


@contextlib.contextmanager
def served(model, checkpoint, runtime_dir, faults, **settings):
    """A daemon whose reads fail as told, and its engine.

    Buffered: direct reads of these small experts would touch their neighbours.
    """
    settings = {"read_mode": "buffered"} | settings
    with (
        daemon_thread(model, runtime_dir, faults, **settings) as daemon,
        ExpertClient(runtime_dir, "engine", checkpoint.fingerprint, TOP_K) as engine,
    ):
        yield daemon, engine


def load(engine, layer, experts, **options):
    answer = engine.miss(layer, experts, **options)
    engine.applied = answer.to_version
    return answer


def evict_all(engine, rounds=2):
    """Ask for every other expert, so that a small arena holds nothing of layer 0."""
    for _ in range(rounds):
        for layer in range(1, N_LAYERS):
            for first in range(0, N_EXPERTS, 8):
                load(engine, layer, range(first, first + 8))


def codes(answer):
    return {(layer, expert): code for layer, expert, code, _ in answer.errors}


def small(checkpoint):
    return {"arena_bytes": smallest_arena(checkpoint, TOP_K), "read_threads": 2}


# wrong bytes


def test_wrong_bytes_twice_are_quarantined_over_restarts_until_lifted(
    model, checkpoint, runtime_dir
):
    faults = Faults()
    with served(model, checkpoint, runtime_dir, faults, **small(checkpoint)) as (daemon, engine):
        load(engine, 0, (3, 4))
        evict_all(engine)
        faults.wrong = of_expert(checkpoint, 0, 3)
        n_reads = daemon.source.n_reads
        answer = load(engine, 0, (3, 4))
        assert codes(answer) == {(0, 3): "CHECKSUM"}
        assert daemon.source.n_reads > n_reads
        stats = engine.stats()
        assert stats["quarantined"] == 1
        slices = checkpoint.slice_map.slices(0, 3)
        first = min(slices, key=lambda one: (checkpoint.shards.index(one.shard), one.offset))
        entry = stats["quarantine layer 0 expert 3"]
        for word in (first.shard.path.name, f"from {first.offset} ", "checksum", "read twice"):
            assert word in entry
        n_reads, n_evictions = daemon.source.n_reads, stats["n_evictions"]
        answer = load(engine, 0, (3, 4))
        assert codes(answer) == {(0, 3): "QUARANTINED"}
        assert answer.slots[1] >= 0
        with ExpertClient(runtime_dir) as reader, pytest.raises(ShardError, match="QUARANTINED"):
            reader.fetch([(0, 3)])
        assert daemon.source.n_reads == n_reads
        assert engine.stats()["n_evictions"] == n_evictions
    with served(model, checkpoint, runtime_dir, faults) as (_, engine):
        assert codes(load(engine, 0, (3, 5))) == {(0, 3): "QUARANTINED"}
        faults.wrong = None
        assert engine.unquarantine([(0, 3), (0, 4)]) == "lifted from 1 of 2 experts"
        answer = load(engine, 0, (3, 5))
        assert answer.errors == ()
        assert slot_bytes(engine, answer.slots[0]) == expert_bytes(checkpoint, 0, 3)
        assert engine.stats()["quarantined"] == 0


def test_a_state_directory_that_hangs_keeps_neither_the_loop_nor_a_successor(
    model, checkpoint, runtime_dir, monkeypatch, capfd
):
    answers = threading.Event()
    monkeypatch.setattr("expert_daemon.model_state.replace_file", lambda *_: answers.wait(50))
    faults = Faults()
    with served(model, checkpoint, runtime_dir, faults, **small(checkpoint)) as (_, engine):
        load(engine, 0, (3, 4))
        evict_all(engine)
        faults.wrong = of_expert(checkpoint, 0, 3)
        began = time.monotonic()
        assert codes(load(engine, 0, (3, 4))) == {(0, 3): "CHECKSUM"}
        assert codes(load(engine, 0, (3, 4))) == {(0, 3): "QUARANTINED"}
        assert engine.unquarantine([(0, 3)]) == "lifted from 1 of 1 experts"
        assert time.monotonic() - began < 5
        faults.wrong = None
    flush()
    assert "the state directory does not answer" in capfd.readouterr().err
    with served(model, checkpoint, runtime_dir, faults) as (_, engine):
        assert load(engine, 0, (3, 4)).errors == ()
        answers.set()


def test_wrong_bytes_once_are_read_again_and_harm_nobody(model, checkpoint, runtime_dir):
    faults = Faults()
    with served(model, checkpoint, runtime_dir, faults, **small(checkpoint)) as (_, engine):
        load(engine, 0, (3,))
        evict_all(engine)
        faults.wrong, faults.wrong_times = of_expert(checkpoint, 0, 3), 1
        answer = load(engine, 0, (3,))
        assert answer.errors == ()
        assert slot_bytes(engine, answer.slots[0]) == expert_bytes(checkpoint, 0, 3)
        stats = engine.stats()
        assert (stats["checksum_retries"], stats["quarantined"]) == (1, 0)


def test_checksums_of_an_earlier_life_are_held_against_later_reads(model, checkpoint, runtime_dir):
    faults = Faults()
    with served(model, checkpoint, runtime_dir, faults) as (_, engine):
        load(engine, 2, (7,))
    faults.wrong = of_expert(checkpoint, 2, 7)
    with served(model, checkpoint, runtime_dir, faults) as (_, engine):
        assert engine.stats()["checksums_known"] == 1
        assert codes(load(engine, 2, (7,))) == {(2, 7): "CHECKSUM"}


def test_one_that_may_not_save_leaves_the_state_directory_alone(model, checkpoint, runtime_dir):
    with served(model, checkpoint, runtime_dir, Faults(), no_save=True) as (_, engine):
        load(engine, 2, (7,))
    assert not (runtime_dir / "state").exists()


# mirrors


def of_record(checkpoint, layer, expert, *, mirror=False):
    """A rule that strikes every read of one expert's record in a pack."""
    slice_map = checkpoint.slice_map
    slices = slice_map.mirror_slices if mirror else slice_map.slices
    places = [
        overlaps(checkpoint.shards.index(one.shard), one.offset, one.n_bytes)
        for one in slices(layer, expert)
    ]
    return lambda *read: any(place(*read) for place in places)


def test_a_packs_mirror_serves_what_its_own_drive_cannot(model, runtime_dir, tmp_path):
    pack(model, tmp_path / "pack", "--mirror", tmp_path / "mirror")
    packed = open_checkpoint(tmp_path / "pack")
    wanted = expert_bytes(open_checkpoint(model), 2, 7)
    home, mirror = of_record(packed, 2, 7), of_record(packed, 2, 7, mirror=True)
    settings = small(packed) | {"read_mode": "direct"}
    faults = Faults(eio=home)
    with served(tmp_path / "pack", packed, runtime_dir, faults, **settings) as (_, engine):
        answer = load(engine, 2, (7, 8))
        assert answer.errors == ()
        assert slot_bytes(engine, answer.slots[0]) == wanted
        assert engine.stats()["mirror_fallbacks"] == 1
        evict_all(engine)
        faults.eio, faults.wrong = None, home
        answer = load(engine, 2, (7,))
        assert (answer.errors, engine.stats()["quarantined"]) == ((), 0)
        assert slot_bytes(engine, answer.slots[0]) == wanted
        evict_all(engine)
        faults.wrong = lambda *read: home(*read) or mirror(*read)
        assert codes(load(engine, 2, (7, 8))) == {(2, 7): "CHECKSUM"}
        assert codes(load(engine, 2, (7, 8))) == {(2, 7): "QUARANTINED"}


# slow reads


def test_a_slow_read_is_hedged_and_the_late_one_never_publishes(
    model, checkpoint, runtime_dir, monkeypatch, capfd
):
    monkeypatch.setattr("expert_daemon.loading.SLOW_READ_NS", 100_000_000)
    monkeypatch.setattr("expert_daemon.server.SLOW_READ_NS", 100_000_000)
    monkeypatch.setattr("expert_daemon.server.TICK_S", 0.05)
    faults = Faults(stuck=of_expert(checkpoint, 1, 3), stuck_times=1)
    with served(model, checkpoint, runtime_dir, faults, read_threads=2) as (daemon, engine):
        began = time.monotonic()
        answer = load(engine, 1, (2, 3))
        assert answer.errors == ()
        assert time.monotonic() - began < 5
        slot = answer.slots[1]
        wanted = expert_bytes(checkpoint, 1, 3)
        assert slot_bytes(engine, slot) == wanted
        stats = engine.stats()
        assert (stats["n_hedges"], stats["slow_reads"], stats["n_loading"]) == (1, 1, 1)
        faults.unstick.set()
        end = time.monotonic() + 5
        while engine.stats()["n_loading"]:
            assert time.monotonic() < end
        assert engine.stats()["n_discarded"] == 1
        assert load(engine, 1, (3,)).slots == (slot,)
        assert slot_bytes(engine, slot) == wanted
        daemon.daemon.cache.check()
    flush()
    lines = [line for line in capfd.readouterr().err.splitlines() if "not back" in line]
    assert len(lines) == 1
    assert "layer 1 expert 3" in lines[0]


@pytest.mark.timing
def test_reads_that_never_return_fail_their_key_and_leave_the_others_alone(
    model, checkpoint, runtime_dir, monkeypatch
):
    monkeypatch.setattr("expert_daemon.loading.SLOW_READ_NS", 50_000_000)
    monkeypatch.setattr("expert_daemon.loading.LOST_READ_NS", 300_000_000)
    monkeypatch.setattr("expert_daemon.server.SLOW_READ_NS", 50_000_000)
    monkeypatch.setattr("expert_daemon.server.TICK_S", 0.05)
    faults = Faults(stuck=of_expert(checkpoint, 1, 3))
    with served(model, checkpoint, runtime_dir, faults, read_threads=2) as (daemon, engine):
        answer = load(engine, 1, (2, 3, 4))
        assert codes(answer) == {(1, 3): "TIMEOUT"}
        (text,) = [text for *_, text in answer.errors]
        assert "has not returned" in text
        assert checkpoint.slice_map.slices(1, 3)[0].shard.path.name in text
        began = time.monotonic()
        assert codes(load(engine, 1, (3,))) == {(1, 3): "TIMEOUT"}  # without a further read
        assert time.monotonic() - began < 0.25
        stats = engine.stats()
        assert (stats["reads_not_back"], stats["lost_reads"]) == (2, 2)
        assert load(engine, 0, range(N_EXPERTS)).errors == ()
        faults.stuck = None
        faults.unstick.set()
        end = time.monotonic() + 5
        while engine.stats()["n_loading"]:
            assert time.monotonic() < end
        answer = load(engine, 1, (3,))
        assert answer.errors == ()
        assert slot_bytes(engine, answer.slots[0]) == expert_bytes(checkpoint, 1, 3)
        daemon.daemon.cache.check()


@pytest.mark.parametrize("seed", range(3))
def test_a_drive_that_fails_in_every_way_loses_no_slot_and_no_byte(
    model, checkpoint, runtime_dir, monkeypatch, seed
):
    monkeypatch.setattr("expert_daemon.loading.SLOW_READ_NS", 5_000_000)
    monkeypatch.setattr("expert_daemon.loading.LOST_READ_NS", 30_000_000)
    monkeypatch.setattr("expert_daemon.server.SLOW_READ_NS", 5_000_000)
    monkeypatch.setattr("expert_daemon.server.TICK_S", 0.01)
    chance = random.Random(seed)
    faults = Faults()
    with served(model, checkpoint, runtime_dir, faults, **small(checkpoint)) as (daemon, engine):
        evict_all(engine, rounds=1)  # the first reads say what is right
        load(engine, 0, range(8))
        load(engine, 0, range(8, N_EXPERTS))
        faults.eio = lambda *_: chance.random() < 0.05
        faults.wrong = lambda *_: chance.random() < 0.02
        faults.late = lambda *_: 0.05 * (chance.random() < 0.02)
        faults.short = 2000
        n_served = 0
        for _ in range(80):
            layer = chance.randrange(N_LAYERS)
            experts = sorted(chance.sample(range(N_EXPERTS), 6))
            for expert, slot in zip(experts, load(engine, layer, experts).slots, strict=True):
                if slot >= 0:
                    n_served += 1
                    assert slot_bytes(engine, slot) == expert_bytes(checkpoint, layer, expert)
        assert n_served > 100
        faults.eio = faults.wrong = faults.late = None
        end = time.monotonic() + 5
        while engine.stats()["n_loading"]:
            assert time.monotonic() < end
        daemon.daemon.cache.check()
        engine.unquarantine((la, ex) for la in range(N_LAYERS) for ex in range(N_EXPERTS))
        for layer in range(N_LAYERS):
            for first in range(0, N_EXPERTS, 8):
                assert load(engine, layer, range(first, first + 8)).errors == ()
