"""The real daemon over fake shards: right bytes, right answers, right refusals."""

from __future__ import annotations

import contextlib
import os
import random
import time

import numpy as np
import pytest

from protocol.arena.attach import AttachRequest, attach
from protocol.errors import DaemonBusy, DaemonLost, ProtocolError, ShardError
from protocol.files.checkpoint import open_checkpoint
from protocol.wire import messages as m
from protocol.wire.client import ExpertClient
from protocol.wire.codec import encode
from protocol.wire.limits import MOST_ROW_REQUESTS
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.faulty_source import Faults, overlaps
from tests.support.raw_client import RawClient, hello
from tests.support.running_daemon import daemon_thread, smallest_arena
from tests.support.shard_bytes import expert_bytes, slot_bytes, table_rows

pytestmark = pytest.mark.timeout(60)

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
    with daemon_thread(model, runtime_dir, read_threads=3) as started:
        yield started


@pytest.fixture
def engine(daemon, checkpoint):
    with engine_of(daemon, checkpoint) as client:
        yield client


def engine_of(daemon, checkpoint, **options):
    return ExpertClient(daemon.runtime_dir, "engine", checkpoint.fingerprint, TOP_K, **options)


@contextlib.contextmanager
def served(model, checkpoint, runtime_dir, faults, **settings):
    """A daemon whose reads fail as told, and its engine."""
    with (
        daemon_thread(model, runtime_dir, faults, **settings) as daemon,
        engine_of(daemon, checkpoint) as engine,
    ):
        yield daemon, engine


def load(engine, layer, experts, **options):
    answer = engine.miss(layer, experts, **options)
    engine.applied = answer.to_version
    return answer


def test_misses_bring_the_shards_bytes_and_hits_read_nothing(engine, checkpoint):
    for layer in range(N_LAYERS):
        answer = load(engine, layer, range(N_EXPERTS))
        assert answer.errors == ()
        assert answer.n_bytes > 0
        for expert, slot in enumerate(answer.slots):
            assert slot_bytes(engine, slot) == expert_bytes(checkpoint, layer, expert)
        again = load(engine, layer, range(N_EXPERTS))
        assert again.slots == answer.slots
        assert again.n_bytes == 0
    stats = engine.stats()
    size = len(expert_bytes(checkpoint, 0, 0))
    assert stats["bytes_read"] == N_LAYERS * N_EXPERTS * size
    assert stats["n_hits"] == stats["n_misses"] == N_LAYERS * N_EXPERTS
    keys = engine.keys()
    assert len(keys) == N_LAYERS * N_EXPERTS


def test_the_same_request_again_gets_the_same_slots_and_reads_nothing(engine):
    connection = engine._connection
    request = m.MissRequest(900, 0, 1, (1, 4), (), 0, 0)
    answers = []
    for _ in range(3):
        connection.send(request)
        answers.append(engine._answer(900, m.SlotChanges, _deadline()))
    assert answers[0].slots == answers[1].slots == answers[2].slots
    assert answers[0].changes == answers[1].changes
    assert engine.stats()["n_loads"] == 2


def _deadline(ms=5000):
    from protocol.wire.connection import Deadline

    return Deadline(ms)


def test_readers_lease_experts_and_give_them_back(daemon, checkpoint):
    with ExpertClient(daemon.runtime_dir) as reader:
        with reader.leased([(2, 3), (0, 1)]) as leases:
            for lease in leases:
                found = slot_bytes(reader, lease.slot)
                assert found == expert_bytes(checkpoint, lease.layer, lease.expert)
        quota = reader.welcome.lease_quota
        keys = [divmod(number, N_EXPERTS) for number in range(quota)]
        leases = reader.fetch(keys)
        with pytest.raises(DaemonBusy):
            reader.fetch([(5, 5)], wait_ms=100)
        with (
            ExpertClient(daemon.runtime_dir) as second,
            ExpertClient(daemon.runtime_dir) as third,
        ):
            second.fetch(keys)  # what one reader keeps leaves another as much
            with pytest.raises(DaemonBusy):
                third.fetch(keys, wait_ms=100)
            reader.release(leases)
            third.release(third.fetch([(5, 5)]))


def test_a_reader_that_leaves_gives_back_its_leases(daemon):
    with ExpertClient(daemon.runtime_dir) as reader:
        quota = reader.welcome.lease_quota
        reader.fetch([divmod(number, N_EXPERTS) for number in range(quota)])
    with ExpertClient(daemon.runtime_dir) as reader:
        reader.fetch([(5, 5)], wait_ms=5000)


def test_rows_come_in_the_order_asked_for(engine, checkpoint):
    rng = np.random.default_rng(3)
    for table in range(len(checkpoint.engram_tables)):
        n_rows = checkpoint.engram_tables[table].n_rows
        for n in (1, 24, 300, 3000):
            rows = rng.integers(0, n_rows, n)
            assert (engine.rows(table, rows) == table_rows(checkpoint, table, rows)).all()


def test_rows_of_both_tables_come_in_one_answer_and_again_from_the_cache(engine, checkpoint):
    rng = np.random.default_rng(6)
    first, second = (rng.integers(0, t.n_rows, 24) for t in checkpoint.engram_tables)
    wanted = [table_rows(checkpoint, 0, first), table_rows(checkpoint, 1, second)]
    for _ in range(2):
        pages = engine.stats()["row_pages"]
        found = engine.take_rows(engine.request_rows(0, first, [(1, second)]))
        assert (found == np.concatenate(wanted)).all()
    assert engine.stats()["row_pages"] == pages
    assert engine.stats()["row_hits"] >= 48
    with pytest.raises(ProtocolError, match="table 0 has"):
        engine.take_rows(engine.request_rows(1, second, [(0, [1 << 31])]))


def test_rows_that_do_not_exist_are_refused_and_the_daemon_goes_on(engine, checkpoint):
    n_rows = checkpoint.engram_tables[0].n_rows
    with pytest.raises(ProtocolError, match=f"row {n_rows}, table 0 has {n_rows} rows"):
        engine.rows(0, [0, n_rows])
    with pytest.raises(ProtocolError):
        engine.rows(7, [0])
    assert engine.ping() < 1000


def test_readers_that_hold_all_the_rows_they_may_keep_no_engine_waiting(daemon, checkpoint):
    with ExpertClient(daemon.runtime_dir) as reader, engine_of(daemon, checkpoint) as engine:
        wanted = np.arange(reader.max_rows) % checkpoint.engram_tables[0].n_rows
        most = MOST_ROW_REQUESTS * len(checkpoint.engram_tables)
        handles = [reader.request_rows(0, wanted) for _ in range(most)]
        with pytest.raises(ProtocolError, match=rf"limit.*{most} are not done"):
            reader.rows(0, [0])
        assert (engine.rows(0, wanted) == table_rows(checkpoint, 0, wanted)).all()
        for handle in handles:
            assert (reader.take_rows(handle) == table_rows(checkpoint, 0, wanted)).all()
        reader.rows(0, [0])


def test_a_second_engine_is_refused_until_the_first_has_left(daemon, checkpoint):
    with engine_of(daemon, checkpoint), pytest.raises(DaemonBusy, match=str(os.getpid())):
        engine_of(daemon, checkpoint, hello_ms=300)
    engine_of(daemon, checkpoint).close()


def test_another_model_is_refused_with_both_sides_named(daemon, checkpoint):
    with pytest.raises(ProtocolError, match="fingerprint") as caught:
        ExpertClient(daemon.runtime_dir, "reader", b"x" * 16)
    assert checkpoint.fingerprint.hex() in str(caught.value)
    assert (b"x" * 16).hex() in str(caught.value)
    assert "it serves another model: give --runtime-dir of another daemon" in str(caught.value)


def test_an_engine_that_may_pick_more_than_the_arena_was_planned_for_is_refused(daemon, checkpoint):
    with pytest.raises(ProtocolError, match="--batch"):
        ExpertClient(daemon.runtime_dir, "engine", checkpoint.fingerprint, TOP_K + 1)


def test_another_protocol_version_is_refused_with_both_sides_named(daemon, checkpoint):
    with RawClient(daemon.runtime_dir) as raw:
        answer = raw.ask(hello(version=(9, 1)))
    assert isinstance(answer, m.Refused)
    assert answer.reason == "version"
    assert "(9, 1)" in answer.text
    assert str(m.PROTOCOL_VERSION) in answer.text


def test_messages_before_hello_and_of_another_session_are_refused(daemon, checkpoint):
    with RawClient(daemon.runtime_dir) as raw:
        assert raw.ask(encode(m.Stats(1), 0, 0)).reason == "hello_first"
        assert raw.ask(encode(m.Stats(1), 1, 1)).reason == "hello_first"
        welcome = raw.ask(hello())
        session, generation = welcome.session, welcome.generation
        assert isinstance(raw.ask(encode(m.Stats(2), session, generation)), m.StatList)
        assert raw.ask(encode(m.Stats(3), session, generation + 1)).reason == "stale"
        stale = raw.ask(encode(m.Stats(4), session + 1, generation))
        assert (stale.reason, stale.request) == ("stale", 4)
        fetch = raw.ask(encode(m.Fetch(5, ((0, 0),), 100), session, generation))
        assert fetch.reason == "hello_first"  # it does not hold the descriptor connection


def engine_hello(checkpoint, **fields):
    return hello(role="engine", fingerprint=checkpoint.fingerprint, top_k_batch=1, **fields)


def test_who_says_hello_as_the_engine_and_never_attaches_keeps_no_engine_out(daemon, checkpoint):
    with RawClient(daemon.runtime_dir) as raw:
        for _ in range(3):
            welcome = raw.ask(engine_hello(checkpoint, pid=1))
            assert isinstance(welcome, m.Welcome)
        with engine_of(daemon, checkpoint, hello_ms=200) as engine:
            stats = encode(m.Stats(1), welcome.session, welcome.generation)
            assert raw.ask(stats).reason == "hello_first"
            refused = raw.ask(engine_hello(checkpoint, pid=1))
            assert (refused.reason, refused.pid) == ("busy", os.getpid())
            assert engine.miss(2, [1]).errors == ()


def test_of_two_that_say_hello_as_the_engine_the_first_that_attaches_is_the_engine(
    daemon, checkpoint
):
    with RawClient(daemon.runtime_dir) as one, RawClient(daemon.runtime_dir) as other:
        first, second = (raw.ask(engine_hello(checkpoint)) for raw in (one, other))
        miss = encode(m.MissRequest(1, 0, 0, (1,), (), 0, 0), first.session, first.generation)
        assert one.ask(miss).reason == "hello_first"
        attached = attach_to(first)
        assert isinstance(one.ask(miss), m.SlotChanges)
        with pytest.raises(DaemonLost, match=f"no session {second.session}"):
            attach_to(second)
        attached.close()


def test_the_arena_is_given_back_once_none_that_said_hello_as_the_engine_is_left(
    daemon, checkpoint
):
    with RawClient(daemon.runtime_dir) as one, RawClient(daemon.runtime_dir) as other:
        welcomes = [one.ask(engine_hello(checkpoint, pid=1))]
        welcomes.append(other.ask(engine_hello(checkpoint, pid=2)))
        for raw, welcome, is_left in zip((one, other), welcomes, (True, False), strict=True):
            raw.send(encode(m.Bye(), welcome.session, welcome.generation))
            assert raw.ask(encode(m.Stats(1), 0, 0)).reason == "hello_first"
            assert daemon.daemon.cache.has_engine == is_left


def attach_to(welcome):
    return attach(
        welcome.descriptor_address,
        AttachRequest(welcome.session, welcome.generation),
        n_bytes=welcome.arena_bytes,
        arena_id=welcome.arena_id,
        timeout_s=5,
    )


def test_a_message_for_another_role_is_refused(daemon, engine):
    engine._connection.send(m.Fetch(77, ((0, 0),), 10))
    refused = engine._connection.receive(_deadline())
    assert (refused.reason, refused.request) == ("role", 77)
    with ExpertClient(daemon.runtime_dir) as reader:
        reader._connection.send(m.MissRequest(5, 0, 0, (1,), (), 0, 0))
        refused = reader._connection.receive(_deadline())
        assert isinstance(refused, m.Refused)
        assert refused.reason == "role"


def test_a_trace_without_a_whole_path_and_a_hint_that_nobody_follows_harm_nobody(engine):
    send, receive = engine._connection.send, engine._connection.receive
    send(m.Trace(50, "x", True))
    answer = receive(_deadline())
    assert (answer.request, answer.ok) == (50, False)
    engine.hint(0, 1, [3, 2])
    assert engine.ping() < 1000


def test_experts_that_cannot_be_read_fail_alone_with_file_layer_and_expert(
    model, checkpoint, runtime_dir
):
    bad = checkpoint.slice_map.slices(2, 7)[3]
    number = checkpoint.shards.index(bad.shard)
    faults = Faults(eio=overlaps(number, bad.offset, bad.n_bytes))
    with daemon_thread(model, runtime_dir, faults, read_mode="buffered") as daemon:
        with engine_of(daemon, checkpoint) as engine:
            answer = load(engine, 2, (5, 7, 9))
            assert [slot >= 0 for slot in answer.slots] == [True, False, True]
            ((layer, expert, code, text),) = answer.errors
            assert (layer, expert, code) == (2, 7, "EIO")
            for word in ("layer 2 expert 7", bad.shard.path.name, "tried 3 times"):
                assert word in text
            for expert in (5, 9):
                slot = answer.slots[(5, 7, 9).index(expert)]
                assert slot_bytes(engine, slot) == expert_bytes(checkpoint, 2, expert)
            faults.eio = None
            assert load(engine, 2, (5, 7, 9)).errors == ()
        with ExpertClient(daemon.runtime_dir) as reader:
            first = checkpoint.slice_map.slices(4, 4)[0]
            faults.eio = overlaps(checkpoint.shards.index(first.shard), first.offset, 1)
            with pytest.raises(ShardError, match="layer 4 expert 4"):
                reader.fetch([(4, 4)])


def test_a_thousand_errors_lose_no_slot(model, checkpoint, runtime_dir):
    chance = random.Random(5)
    faults = Faults(eio=lambda *_: chance.random() < 0.8)
    smallest = smallest_arena(checkpoint, TOP_K)
    settings = {"read_threads": 2, "arena_bytes": smallest}
    with served(model, checkpoint, runtime_dir, faults, **settings) as (daemon, engine):
        n_errors = 0
        while n_errors < 1000:
            layer = chance.randrange(N_LAYERS)
            experts = sorted(chance.sample(range(N_EXPERTS), 8))
            answer = load(engine, layer, experts)
            n_errors += len(answer.errors)
        faults.eio = None
        for layer in range(N_LAYERS):
            answer = load(engine, layer, range(N_EXPERTS))
            assert answer.errors == ()
            for expert, slot in enumerate(answer.slots):
                assert slot_bytes(engine, slot) == expert_bytes(checkpoint, layer, expert)
        daemon.daemon.cache.check()


@pytest.mark.parametrize("seed", range(3))
def test_short_reads_in_any_order_give_the_same_bytes(model, checkpoint, runtime_dir, seed):
    faults = Faults(short=300, shuffle=random.Random(seed))
    with served(model, checkpoint, runtime_dir, faults, read_threads=4) as (_, engine):
        for layer in (0, 3):
            answer = load(engine, layer, range(N_EXPERTS))
            for expert, slot in enumerate(answer.slots):
                assert slot_bytes(engine, slot) == expert_bytes(checkpoint, layer, expert)


def test_a_deadline_closes_the_window_by_cancel_and_a_stuck_read_harms_nobody(
    model, checkpoint, runtime_dir
):
    stuck = checkpoint.slice_map.slices(1, 3)[0]
    faults = Faults(stuck=overlaps(checkpoint.shards.index(stuck.shard), stuck.offset, 1))
    with served(model, checkpoint, runtime_dir, faults, read_threads=3) as (_, engine):
        answer = load(engine, 1, (2, 3, 5), timeout_ms=300)
        assert [code for _, expert, code, _ in answer.errors if expert == 3] == ["CANCELLED"]
        assert answer.slots[1] == -1
        assert load(engine, 0, (0, 1)).errors == ()
        faults.unstick.set()
        time.sleep(0.1)
        answer = load(engine, 1, (2, 3, 5))
        assert answer.errors == ()
        for expert, slot in zip((2, 3, 5), answer.slots, strict=True):
            assert slot_bytes(engine, slot) == expert_bytes(checkpoint, 1, expert)


def test_a_client_that_does_not_read_is_dropped_and_the_others_are_served(daemon, checkpoint):
    with RawClient(daemon.runtime_dir) as raw, ExpertClient(daemon.runtime_dir) as reader:
        welcome = raw.ask(hello())
        raw.socket.rcvhwm = 1
        frame = encode(m.Stats(1), welcome.session, welcome.generation)
        for _ in range(3000):
            raw.send(frame)
        for _ in range(50):
            assert reader.ping() < 1000


def test_a_lost_daemon_is_an_error_in_time(model, checkpoint, runtime_dir):
    with daemon_thread(model, runtime_dir) as daemon:
        engine = engine_of(daemon, checkpoint)
    began = time.monotonic()
    with pytest.raises(DaemonLost):
        engine.miss(0, (1,))
    engine.close()
    assert time.monotonic() - began < 5
