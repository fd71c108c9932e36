"""Chunks through the real daemon: right bytes in ascending order, whatever goes wrong."""

from __future__ import annotations

import random
import threading
import time

import pytest

from compute.experts.miss_client import MissClient, RequestCancelled, Waiting
from compute.load import expert_shapes
from protocol.errors import DaemonLost, ProtocolError
from protocol.files.checkpoint import open_checkpoint
from protocol.wire import messages as m
from protocol.wire.client import ExpertClient
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.faulty_source import Faults, overlaps
from tests.support.running_daemon import daemon_process, daemon_thread, smallest_arena
from tests.support.shard_bytes import expert_bytes, slot_bytes

pytestmark = pytest.mark.timeout(60)

N_LAYERS, N_EXPERTS, TOP_K = 3, 64, 2
ALL = range(N_EXPERTS)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    return write_fake_checkpoint(directory, n_layers=N_LAYERS, n_experts=N_EXPERTS, top_k=TOP_K)


@pytest.fixture(scope="module")
def checkpoint(model):
    return open_checkpoint(model)


@pytest.fixture
def smallest(checkpoint):
    return smallest_arena(checkpoint, TOP_K)


def engine_of(runtime_dir, checkpoint):
    return ExpertClient(runtime_dir, "engine", checkpoint.fingerprint, TOP_K)


def named(stream, part):
    pairs = zip(stream.request.experts, part.slots, strict=True)
    return [(expert, slot) for expert, slot in pairs if slot >= 0]


def take(engine, checkpoint, layer, experts=ALL, **how):
    """Run a stream to its end; each expert's bytes are compared before it is consumed."""
    seen: list[int] = []
    codes: dict[int, str] = {}
    with engine.stream(layer, experts, **{"window": 8, **how}) as stream:
        for part in stream:
            assert part.from_version <= engine.applied
            engine.applied = part.to_version
            codes |= {fault[1]: fault[2] for fault in part.errors}
            for expert, slot in named(stream, part):
                assert slot_bytes(engine, slot) == expert_bytes(checkpoint, layer, expert)
                seen.append(expert)
                stream.consumed(expert)
    engine.ack(engine.applied)
    return seen, codes


def test_a_layer_larger_than_the_arena_streams_through_it_in_order(
    model, checkpoint, runtime_dir, smallest
):
    with (
        daemon_thread(model, runtime_dir, arena_bytes=smallest) as daemon,
        engine_of(daemon.runtime_dir, checkpoint) as engine,
    ):
        assert engine.welcome.n_slots < N_EXPERTS
        for layer in range(N_LAYERS):
            assert take(engine, checkpoint, layer) == (list(ALL), {})
        stats = engine.stats()
        assert stats["n_streams"] == N_LAYERS
        assert stats["bytes_read"] <= N_LAYERS * N_EXPERTS * len(expert_bytes(checkpoint, 0, 0))


def test_the_next_layers_reads_run_behind_this_ones_compute(
    model, checkpoint, runtime_dir, smallest
):
    with (
        daemon_thread(model, runtime_dir, arena_bytes=smallest) as daemon,
        engine_of(daemon.runtime_dir, checkpoint) as engine,
    ):
        ahead = [(1, expert) for expert in range(6)]
        take(engine, checkpoint, 0, ahead=ahead)
        for _ in range(200):
            stats = engine.stats()
            if stats["n_ahead"] and not stats["n_loading"]:
                break
            time.sleep(0.01)
        assert stats["n_ahead"] > 0
        assert take(engine, checkpoint, 1) == (list(ALL), {})
        assert engine.stats()["n_hits"] >= stats["n_ahead"]


def test_the_decode_set_outlives_large_prefills(model, checkpoint, runtime_dir, smallest):
    with (
        daemon_thread(model, runtime_dir, arena_bytes=smallest) as daemon,
        engine_of(daemon.runtime_dir, checkpoint) as engine,
    ):
        n_slots = engine.welcome.n_slots
        decode = [divmod(key, N_EXPERTS) for key in range(n_slots // 3)]
        for step in range(4):
            for layer, expert in decode:
                engine.applied = engine.miss(layer, [expert], step=step).to_version
        before = {tuple(key) for key in engine.keys()[["layer", "expert"]].tolist()}
        assert set(decode) <= before
        for step in range(4, 7):
            for layer in range(N_LAYERS):
                take(engine, checkpoint, layer, step=step)
        after = {tuple(key) for key in engine.keys()[["layer", "expert"]].tolist()}
        assert len(before - after) <= n_slots // 4


def test_a_bad_expert_fails_alone(model, checkpoint, runtime_dir, smallest):
    piece = checkpoint.slice_map.slices(0, 5)[0]
    shard = list(checkpoint.shards).index(piece.shard)
    faults = Faults(eio=overlaps(shard, piece.offset, piece.n_bytes))
    with (
        daemon_thread(model, runtime_dir, faults, arena_bytes=smallest) as daemon,
        engine_of(daemon.runtime_dir, checkpoint) as engine,
    ):
        seen, codes = take(engine, checkpoint, 0)
        assert codes[5] == "EIO"
        assert sorted([*seen, *codes]) == list(ALL)


@pytest.mark.parametrize("seed", range(3))
def test_reads_that_end_in_any_order_are_named_in_order(
    model, checkpoint, runtime_dir, smallest, seed
):
    faults = Faults(short=3000, shuffle=random.Random(seed))
    with (
        daemon_thread(model, runtime_dir, faults, arena_bytes=smallest) as daemon,
        engine_of(daemon.runtime_dir, checkpoint) as engine,
    ):
        assert take(engine, checkpoint, 1, window=16) == (list(ALL), {})


def test_a_stream_left_early_is_cancelled_and_the_next_request_is_right(
    model, checkpoint, runtime_dir, smallest
):
    with (
        daemon_thread(model, runtime_dir, arena_bytes=smallest) as daemon,
        engine_of(daemon.runtime_dir, checkpoint) as engine,
    ):
        with engine.stream(0, ALL, window=4) as stream:
            next(stream)
        assert stream.ended
        assert take(engine, checkpoint, 1) == (list(ALL), {})
        abandoned = engine.stream(2, ALL, window=4)
        next(abandoned)
        answer = engine.miss(0, [3, 4])  # closes the other's window first
        engine.applied = answer.to_version
        assert [slot_bytes(engine, slot) for slot in answer.slots] == [
            expert_bytes(checkpoint, 0, 3),
            expert_bytes(checkpoint, 0, 4),
        ]


def test_a_part_that_does_not_come_ends_the_stream_at_its_deadline(
    model, checkpoint, runtime_dir, smallest
):
    with (
        daemon_thread(model, runtime_dir, arena_bytes=smallest) as daemon,
        engine_of(daemon.runtime_dir, checkpoint) as engine,
    ):
        daemon.faults.stuck = lambda *_: True
        with engine.stream(0, ALL, window=4, timeout_ms=200) as stream:
            (part,) = list(stream)
        assert part.final
        assert {fault[2] for fault in part.errors} == {"CANCELLED"}
        assert len(part.errors) == N_EXPERTS
        daemon.faults.unstick.set()
        engine.applied = part.to_version
        assert take(engine, checkpoint, 0) == (list(ALL), {})


def test_without_consumed_the_daemon_goes_no_further_than_the_window(
    model, checkpoint, runtime_dir, smallest
):
    with (
        daemon_thread(model, runtime_dir, arena_bytes=smallest) as daemon,
        engine_of(daemon.runtime_dir, checkpoint) as engine,
    ):
        with engine.stream(0, ALL, window=3, timeout_ms=500) as stream:
            slots = [pair for part in stream for pair in named(stream, part)]
        assert [expert for expert, _ in slots] == [0, 1, 2]


def test_a_daemon_killed_in_mid_stream_is_lost(model, checkpoint, runtime_dir):
    with daemon_process(model, runtime_dir) as daemon, engine_of(runtime_dir, checkpoint) as engine:
        stream = engine.stream(0, ALL, window=2)
        next(stream)
        threading.Timer(0.1, daemon.kill).start()
        with pytest.raises(DaemonLost):
            list(stream)
        stream.close()
        daemon.start()
        engine.reconnect(5000)
        engine.applied = engine.welcome.version
        assert take(engine, checkpoint, 0)[0] == list(ALL)


def test_consumed_of_nothing_and_a_second_window_harm_nobody(model, checkpoint, runtime_dir):
    with (
        daemon_thread(model, runtime_dir) as daemon,
        engine_of(daemon.runtime_dir, checkpoint) as engine,
    ):
        engine.send_consumed(999, 5)
        stream = engine.stream(0, ALL, window=2)
        next(stream)
        engine._connection.send(m.MissRequest(500, 0, 1, (1,), (), 0, 0))
        with pytest.raises(ProtocolError, match="window of request"):
            engine._answer(500, m.SlotChanges, _deadline())
        stream.close()
        assert take(engine, checkpoint, 0) == (list(ALL), {})


def _deadline(ms=5000):
    from protocol.wire.connection import Deadline

    return Deadline(ms)


def test_no_entry_is_left_wrong_by_chunks_that_are_given_up(
    model, checkpoint, runtime_dir, smallest
):
    """What was read before a stream was cancelled took the slots of other keys."""
    drawn = random.Random(3)
    asked = [0, 0]  # how often, and at which time the answer is yes

    def cancelled():
        asked[0] += 1
        return asked[0] >= asked[1] > 0

    with (
        daemon_thread(model, runtime_dir, arena_bytes=smallest) as daemon,
        engine_of(daemon.runtime_dir, checkpoint) as engine,
    ):
        source = MissClient(engine, expert_shapes(checkpoint), Waiting(cancelled))
        for number in range(24):
            asked[:] = 0, drawn.randrange(2, 20)
            source.begin_step()
            with pytest.raises(RequestCancelled):
                _take_all(source)
            asked[1] = 0
            for layer, row in enumerate(source._table.slots):
                for expert, slot in enumerate(row):
                    if slot >= 0:
                        wanted = expert_bytes(checkpoint, layer, expert)
                        assert slot_bytes(engine, slot) == wanted, (number, layer, expert)


def _take_all(source):
    for layer in range(N_LAYERS):
        for _ in source.stream(layer, list(ALL)):
            pass
