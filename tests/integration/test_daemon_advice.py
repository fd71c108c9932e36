"""Keys to be warm and hints, through the real daemon."""

from __future__ import annotations

import time
from contextlib import suppress

import numpy as np
import pytest

from expert_daemon import advice_desk, foresight
from protocol.errors import DaemonLost
from protocol.files.checkpoint import open_checkpoint
from protocol.wire.client import ExpertClient
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.faulty_source import Faults
from tests.support.running_daemon import daemon_thread, smallest_arena
from tests.support.shard_bytes import expert_bytes, slot_bytes

pytestmark = pytest.mark.timeout(60)

N_LAYERS, N_EXPERTS, TOP_K = 4, 32, 2
EVERY_KEY = [(layer, expert) for layer in range(N_LAYERS) for expert in range(N_EXPERTS)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    return write_fake_checkpoint(directory, n_layers=N_LAYERS, n_experts=N_EXPERTS, top_k=TOP_K)


@pytest.fixture(scope="module")
def checkpoint(model):
    return open_checkpoint(model)


def engine_of(daemon, checkpoint):
    return ExpertClient(daemon.runtime_dir, "engine", checkpoint.fingerprint, TOP_K)


def eventually(client, condition, seconds=10.0):
    end = time.monotonic() + seconds
    while True:
        with suppress(DaemonLost):  # a busy machine may take longer than the deadline of Stats
            if condition(stats := client.stats()):
                return stats
        assert time.monotonic() < end, "never came true"
        time.sleep(0.01)


def keys_of(client):
    return {tuple(key) for key in client.keys()[["layer", "expert"]].tolist()}


def test_a_reader_warms_a_cold_arena(model, checkpoint, runtime_dir):
    with (
        daemon_thread(model, runtime_dir) as daemon,
        ExpertClient(daemon.runtime_dir) as client,
    ):
        client.warm(EVERY_KEY)
        stats = eventually(client, lambda s: not s["warm_left"] and not s["n_loading"])
        assert stats["n_warm"] == len(EVERY_KEY)
        assert keys_of(client) == set(EVERY_KEY)
        with client.leased([(2, 7)]) as (lease,):
            assert slot_bytes(client, lease.slot) == expert_bytes(checkpoint, 2, 7)
        assert client.stats()["n_fetch_hits"] == 1


def test_warm_reads_go_in_the_order_of_the_file(model, checkpoint, runtime_dir, monkeypatch):
    with (
        daemon_thread(model, runtime_dir, read_threads=1) as daemon,
        ExpertClient(daemon.runtime_dir) as client,
    ):
        read = []
        reader = daemon.daemon._server._works.reader
        original = reader.submit

        def submit(key, *rest, **how):
            read.append(key)
            return original(key, *rest, **how)

        monkeypatch.setattr(reader, "submit", submit)
        client.warm(EVERY_KEY[::-1])
        eventually(client, lambda s: not s["warm_left"] and not s["n_loading"])
        first = {
            key: min((str(p.shard.path), p.offset) for p in checkpoint.slice_map.slices(*key))
            for key in EVERY_KEY
        }
        assert read == sorted(EVERY_KEY, key=first.__getitem__)


def test_the_hottest_are_loaded_where_not_all_have_room(model, checkpoint, runtime_dir):
    smallest = smallest_arena(checkpoint, TOP_K)
    with (
        daemon_thread(model, runtime_dir, arena_bytes=smallest) as daemon,
        ExpertClient(daemon.runtime_dir) as client,
    ):
        client.warm(EVERY_KEY[::-1])
        eventually(client, lambda s: not s["warm_left"] and not s["n_loading"])
        keys = keys_of(client)
        assert len(keys) >= client.welcome.n_slots * 3 // 4
        assert keys == set(EVERY_KEY[::-1][: len(keys)])


def count_by_turn(monkeypatch, turn, piece):
    """How often `piece`, (owner, name), was called in each call of `turn`."""
    counts = []
    whole, part = getattr(*turn), getattr(*piece)

    def counted_turn(*args):
        counts.append(0)
        return whole(*args)

    def counted_piece(*args):
        counts[-1] += 1
        return part(*args)

    monkeypatch.setattr(*turn, counted_turn)
    monkeypatch.setattr(*piece, counted_piece)
    return counts


def test_places_in_the_files_are_looked_up_a_few_at_a_time_and_once(
    model, checkpoint, runtime_dir, monkeypatch
):
    monkeypatch.setattr(advice_desk, "MOST_LOOKED_UP", 5)
    with (
        daemon_thread(model, runtime_dir) as daemon,
        ExpertClient(daemon.runtime_dir) as client,
    ):
        order = daemon.daemon._server._advice._order
        counts = count_by_turn(monkeypatch, (order, "learn"), (order, "_place"))
        client.warm(EVERY_KEY)
        eventually(client, lambda s: not s["warm_left"] and not s["n_loading"])
        assert keys_of(client) == set(EVERY_KEY)
        assert counts == [5] * (len(EVERY_KEY) // 5) + [len(EVERY_KEY) % 5]
        client.warm(EVERY_KEY)
        eventually(client, lambda s: s["n_warm_passed"] == len(EVERY_KEY))
        assert counts[-1] == 0


def test_a_full_arena_is_held_against_a_few_keys_at_a_time_and_in_the_end_all(
    model, checkpoint, runtime_dir, monkeypatch
):
    monkeypatch.setattr(foresight, "MOST_WARM_LOOKS", 4)
    smallest = smallest_arena(checkpoint, TOP_K)
    with (
        daemon_thread(model, runtime_dir, arena_bytes=smallest) as daemon,
        ExpertClient(daemon.runtime_dir) as client,
    ):
        client.warm(EVERY_KEY)
        eventually(client, lambda s: not s["warm_left"] and not s["n_loading"])
        residents = keys_of(client)
        with engine_of(daemon, checkpoint) as engine:
            for step in range(3):
                engine.touch(step, np.array(sorted(residents), "<u2"))
            engine.ping()
        looking = daemon.daemon._server._works.loading.cache._serving.foresight
        counts = count_by_turn(monkeypatch, (looking, "place"), (looking, "_is_absent"))
        absent = [key for key in EVERY_KEY if key not in residents][: len(residents)]
        client.warm(absent)
        stats = eventually(client, lambda s: not s["warm_left"] and not s["n_loading"])
        assert max(counts) == 4
        assert stats["n_warm"] + stats["n_warm_passed"] == len(residents) + len(absent)
        assert keys_of(client) > residents  # there were slots beyond the pool


def test_demand_is_served_while_the_arena_is_being_warmed(model, checkpoint, runtime_dir):
    faults = Faults()
    with (
        daemon_thread(model, runtime_dir, faults) as daemon,
        engine_of(daemon, checkpoint) as engine,
    ):
        faults.delay = 0.002
        engine.warm(EVERY_KEY)
        for expert in range(10):
            answer = engine.miss(3, [expert, expert + 20])
            engine.applied = answer.to_version
            assert answer.errors == ()
            for number, slot in zip((expert, expert + 20), answer.slots, strict=True):
                assert slot_bytes(engine, slot) == expert_bytes(checkpoint, 3, number)
        faults.delay = 0
        eventually(engine, lambda s: not s["warm_left"] and not s["n_loading"])
        assert keys_of(engine) == set(EVERY_KEY)


def test_hints_are_followed_only_where_the_daemon_was_told_to(model, checkpoint, runtime_dir):
    with daemon_thread(model, runtime_dir) as daemon, engine_of(daemon, checkpoint) as engine:
        engine.hint(1, 2, [5, 6, 7])
        engine.applied = engine.miss(0, [1], step=1, hints=[(1, 3)]).to_version
        assert engine.ping() < 1000
        stats = engine.stats()
        assert (stats["n_hints"], stats["prefetch"]) == (0, 0)
        assert keys_of(engine) == {(0, 1)}


def test_hints_are_read_and_of_use(model, checkpoint, runtime_dir):
    with (
        daemon_thread(model, runtime_dir, prefetch=True) as daemon,
        engine_of(daemon, checkpoint) as engine,
    ):
        engine.hint(1, 2, [5, 6, 7])
        engine.applied = engine.miss(0, [1], step=1, hints=[(1, 3)]).to_version
        stats = eventually(engine, lambda s: s["n_hints"] == 4 and not s["n_loading"])
        assert keys_of(engine) == {(0, 1), (1, 3), (2, 5), (2, 6), (2, 7)}
        answer = engine.miss(1, [3], step=1)
        engine.applied = answer.to_version
        assert answer.n_bytes == 0
        assert slot_bytes(engine, answer.slots[0]) == expert_bytes(checkpoint, 1, 3)
        stats = engine.stats()
        assert (stats["n_hints_useful"], stats["n_hints_wasted"]) == (1, 0)
        assert stats["hints_ended"] == 0


def test_hints_that_are_stale_are_given_up(model, checkpoint, runtime_dir):
    faults = Faults()
    with (
        daemon_thread(model, runtime_dir, faults, prefetch=True) as daemon,
        engine_of(daemon, checkpoint) as engine,
    ):
        faults.delay = 0.05
        engine.hint(1, 1, list(range(12)))
        eventually(engine, lambda s: s["n_hints"] > 0)
        engine.applied = engine.miss(2, [1], step=1).to_version
        stats = eventually(engine, lambda s: not s["n_loading"])
        assert stats["n_hints"] < 12
        assert stats["n_hints_stale"] > 0
        assert stats["read_errors"] == 0
