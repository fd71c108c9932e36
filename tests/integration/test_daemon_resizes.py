"""The arena made smaller and larger while clients use it."""

from __future__ import annotations

import os
import re
import socket
import threading
import time

import pytest

from compute.experts.miss_client import MissClient, Waiting
from compute.load import expert_shapes
from expert_daemon import arena_size, populate
from expert_daemon.arena_plan import plan
from expert_daemon.log import CLIENT_LINES_A_MINUTE, flush
from protocol.arena.attach import AttachRequest
from protocol.errors import DaemonLost
from protocol.files.checkpoint import open_checkpoint
from protocol.wire import messages as m
from protocol.wire.client import ExpertClient
from protocol.wire.codec import encode
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.raw_client import RawClient, hello
from tests.support.running_daemon import DaemonProcess, daemon_thread, smallest_arena
from tests.support.shard_bytes import expert_bytes, slot_bytes

pytestmark = pytest.mark.timeout(90)

N_LAYERS, N_EXPERTS, TOP_K = 4, 64, 2
EVERY_KEY = [(layer, expert) for layer in range(N_LAYERS) for expert in range(N_EXPERTS)]


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


@pytest.fixture
def sizes(smallest):
    """Small, large, and the most: bytes."""
    return smallest + (512 << 10), smallest + (800 << 10), smallest + (1 << 20)


@pytest.fixture
def daemon(model, runtime_dir, sizes):
    _, large, most = sizes
    with daemon_thread(model, runtime_dir, arena_bytes=large, arena_max_bytes=most) as started:
        yield started


def engine_of(runtime_dir, checkpoint):
    return ExpertClient(runtime_dir, "engine", checkpoint.fingerprint, TOP_K)


def populated(daemon):
    return os.fstat(daemon.daemon._arena.descriptor).st_blocks * 512


def patient(ask):
    """What a request without effects says; a busy machine may take longer than its deadline."""
    for _ in range(10):
        try:
            return ask()
        except DaemonLost as lost:
            if "no answer" not in str(lost):
                raise
    raise AssertionError("no answer at all")


def filled(client):
    client.warm(EVERY_KEY)
    end = time.monotonic() + 20
    while (stats := patient(client.stats))["warm_left"] or stats["n_loading"]:
        assert time.monotonic() < end
        time.sleep(0.01)
    return stats


def check_bytes(client, checkpoint):
    """Every expert that the arena names has its bytes."""
    for layer, expert, slot in patient(client.keys).tolist():
        assert slot_bytes(client, slot) == expert_bytes(checkpoint, layer, expert)


def test_without_an_engine_the_arena_shrinks_and_grows_and_memory_follows(
    daemon, checkpoint, sizes
):
    small, large, most = sizes
    with ExpertClient(daemon.runtime_dir) as client:
        before = filled(client)
        assert populated(daemon) <= large
        shrunk = client.resize(small)
        assert shrunk.text == ""
        assert small - before["slot_bytes"] < shrunk.n_bytes <= small
        assert populated(daemon) <= small
        stats = patient(client.stats)
        assert stats["arena_bytes"] == shrunk.n_bytes
        assert stats["n_slots"] < before["n_slots"]
        assert stats["n_resident"] <= stats["n_slots"]
        check_bytes(client, checkpoint)
        grown = client.resize(most)
        assert grown.text == ""
        assert grown.n_bytes <= most
        assert most - 4096 < populated(daemon) <= most
        assert filled(client)["n_resident"] > before["n_resident"]
        check_bytes(client, checkpoint)


def test_memory_that_is_given_back_slowly_holds_nobody_up(daemon, checkpoint, sizes, monkeypatch):
    small, large, most = sizes
    begun, go_on = threading.Event(), threading.Event()
    give_back = populate.punch_hole

    def slow(*hole, **options):
        begun.set()
        assert go_on.wait(20)
        return give_back(*hole, **options)

    monkeypatch.setattr(arena_size, "punch_hole", slow)
    with (
        ExpertClient(daemon.runtime_dir) as client,
        ExpertClient(daemon.runtime_dir) as other,
        engine_of(daemon.runtime_dir, checkpoint) as engine,
    ):
        filled(client)
        engine.close()
        client.resize(small, timeout_ms=100)
        assert begun.wait(20)
        check_bytes(other, checkpoint)
        for size in (large, most):
            assert "under way, its memory is being given back" in patient(
                lambda size=size: other.resize(size).text
            )
        go_on.set()
        assert other.resize(small).text == ""
        assert populated(daemon) <= small
        assert other.resize(large).text == ""
        filled(other)
        check_bytes(other, checkpoint)


def test_memory_that_cannot_be_given_back_is_told_of_and_given_back_with_the_next_shrink(
    daemon, sizes, monkeypatch, capfd
):
    small, large, _ = sizes
    give_back = populate.punch_hole
    failing = [None, OSError(5, "no")]

    def fails(*hole, **options):
        if not failing:
            return give_back(*hole, **options)
        failure = failing.pop()
        if failure is not None:
            raise failure
        return False

    monkeypatch.setattr(arena_size, "punch_hole", fails)
    with ExpertClient(daemon.runtime_dir) as client:
        for _ in range(3):
            filled(client)
            assert client.resize(small).text == ""
            now = populated(daemon)
            assert client.resize(large).text == ""
        assert now <= small
    flush()
    lines = [line for line in capfd.readouterr().err.splitlines() if "given back" in line]
    assert lines == [
        "some of the memory could not be given back: [Errno 5] no",
        "some of the memory could not be given back: a drive writes beside it without a pause",
    ]


def test_the_refusal_of_a_size_beyond_the_maximum_says_where_that_comes_from(
    model, runtime_dir, smallest
):
    with (
        daemon_thread(model, runtime_dir, arena_bytes=smallest + (1 << 20)) as daemon,
        ExpertClient(daemon.runtime_dir) as client,
    ):
        text = client.resize(10 << 40).text
    assert f"{smallest + (1 << 20)} bytes) at most: that is the --arena it was started" in text
    assert text.endswith("a start with --arena-max allows more")


def test_a_maximum_that_nobody_gave_is_said_to_be_the_memorys(checkpoint, smallest):
    sizes = {"size_bytes": 0, "max_bytes": 0, "top_k_batch": TOP_K}
    assert "half of this machine's memory" in plan(checkpoint, **sizes).max_from
    sizes["size_bytes"] = smallest
    assert "--arena it was" in plan(checkpoint, **sizes).max_from


def test_sizes_that_cannot_be_are_refused_with_the_figures(daemon, sizes, smallest):
    _, _, most = sizes
    with ExpertClient(daemon.runtime_dir) as client:
        now = patient(client.stats)["arena_bytes"]
        beyond = client.resize(most + 1)
        assert str(most) in beyond.text
        assert "that is the --arena-max it was started with" in beyond.text
        assert beyond.n_bytes == now
        below = client.resize(smallest - 1)
        for addend in ("2 x top-k x batch", "free pool", "hedged reads", "prefill window"):
            assert addend in below.text
        least = int(below.text.rpartition("smallest: ")[2].split()[0])
        found = re.search(r"in bytes:\n(.*)\nsmallest: ", below.text, re.DOTALL)
        assert found
        addends = {
            name.strip(): int(n_bytes)
            for name, n_bytes in (line.rsplit(maxsplit=1) for line in found[1].splitlines())
        }
        assert "Engram rows, laid out at the start" in addends
        assert sum(addends.values()) == least
        assert client.resize(least - 1).text.endswith(f"smallest: {least} bytes")
        assert client.resize(now).text == ""
        assert patient(client.stats)["arena_bytes"] == now
        smallest = client.resize(least)
        assert (smallest.n_bytes, smallest.text) == (least, "")


class SlowEngine(threading.Thread):
    """An engine that decodes: its steps read the slots that its table names, and check them."""

    def __init__(self, daemon, checkpoint):
        super().__init__(daemon=True)
        self.client = engine_of(daemon.runtime_dir, checkpoint)
        self.source = MissClient(self.client, expert_shapes(checkpoint), Waiting())
        self.checkpoint = checkpoint
        self.stopped = threading.Event()
        self.n_steps = 0
        self.failure: BaseException | None = None
        self.start()

    def run(self):
        try:
            while not self.stopped.is_set():
                self.step(self.n_steps)
                self.n_steps += 1
        except BaseException as error:  # noqa: BLE001
            self.failure = error

    def step(self, number):
        self.source.begin_step()
        for layer in range(N_LAYERS):
            picks = sorted({(7 * number + layer) % N_EXPERTS, (11 * number) % N_EXPERTS})
            if number % 16 == 5:
                picks = list(range(N_EXPERTS))
            for expert, matrices in self.source.stream(layer, picks):
                wanted = expert_bytes(self.checkpoint, layer, expert)
                gate = matrices.gate.numpy().tobytes()
                assert wanted.startswith(gate)
        self.source.end_step()

    def close(self):
        self.stopped.set()
        self.join(20)
        assert not self.is_alive()
        self.client.close()
        if self.failure is not None:
            raise self.failure


def test_an_engine_that_decodes_goes_on_through_resizes(daemon, checkpoint, sizes):
    small, large, most = sizes
    engine = SlowEngine(daemon, checkpoint)
    try:
        with ExpertClient(daemon.runtime_dir) as client:
            for n_bytes in (small, most, large, small, large):
                resized = client.resize(n_bytes, timeout_ms=20_000)
                assert resized.text == ""
                assert resized.n_bytes <= n_bytes
                assert populated(daemon) <= n_bytes
                done = engine.n_steps
                while engine.n_steps < done + 5 and engine.failure is None:
                    time.sleep(0.01)
            check = patient(client.stats)
            assert check["n_slots"] == engine.client._n_slots
    finally:
        engine.close()
    assert engine.n_steps > 20


def test_memory_is_given_back_only_when_the_engine_has_let_go(daemon, checkpoint, sizes):
    small, _, _ = sizes
    with (
        engine_of(daemon.runtime_dir, checkpoint) as engine,
        ExpertClient(daemon.runtime_dir) as client,
    ):
        filled(client)
        engine.applied = engine.resync().version
        waiting = client.resize(small, timeout_ms=300)
        assert "goes on: " in waiting.text
        assert populated(daemon) > small
        for changes in engine.changes():
            engine.applied = max(engine.applied, changes.to_version)
        engine.begin_epoch()  # something of the older table runs
        engine.ack(engine.applied, epoch_done=0)
        assert client.resize(small, timeout_ms=300).text.endswith("slots are still in use")
        assert engine.memory_changes() == []
        engine.ack(engine.applied, epoch_done=1)
        assert client.resize(small, timeout_ms=300).text.endswith("has not answered yet")
        (drop,) = engine.memory_changes()
        assert isinstance(drop, m.Drop)
        assert populated(daemon) > small
        engine.dropped(drop)
        assert client.resize(small, timeout_ms=5000).text == ""
        assert populated(daemon) <= small


def test_added_slots_are_used_only_when_the_engine_can_read_them(daemon, checkpoint, sizes):
    _, _, most = sizes
    with (
        engine_of(daemon.runtime_dir, checkpoint) as engine,
        ExpertClient(daemon.runtime_dir) as client,
    ):
        filled(client)
        before, n_slots = patient(client.stats)["n_resident"], engine.welcome.n_slots
        assert client.resize(most, timeout_ms=300).text.endswith("has not answered yet")
        engine.applied = engine.resync().version
        engine.ack(engine.applied)
        assert filled(client)["n_resident"] == before
        (added,) = engine.memory_changes()
        assert isinstance(added, m.Added)
        engine.added(added)
        engine.ack(engine.applied)
        assert client.resize(most, timeout_ms=5000).text == ""
        assert filled(client)["n_resident"] > before
        assert max(patient(client.keys)["slot"].tolist()) >= n_slots
        engine.changes()  # names slots beyond those of the Welcome


def test_a_new_engine_is_told_of_a_resize_under_way(daemon, checkpoint, sizes):
    small, _, _ = sizes
    with ExpertClient(daemon.runtime_dir) as client:
        first = engine_of(daemon.runtime_dir, checkpoint)
        filled(client)
        first.applied = first.resync().version
        client.resize(small, timeout_ms=200)
        for changes in first.changes():
            first.applied = max(first.applied, changes.to_version)
        first.ack(first.applied)
        client.resize(small, timeout_ms=200)
        assert len(first.memory_changes()) == 1
        first.reconnect(5000)  # the same process, which has let go of nothing yet
        end = time.monotonic() + 5
        while not (drops := first.memory_changes()):
            assert time.monotonic() < end
            time.sleep(0.01)
        (drop,) = drops
        first.dropped(drop)
        assert client.resize(small, timeout_ms=5000).text == ""
        first.close()


def test_an_engine_that_leaves_is_waited_for_no_longer(daemon, checkpoint, sizes):
    small, _, _ = sizes
    with ExpertClient(daemon.runtime_dir) as client:
        engine = engine_of(daemon.runtime_dir, checkpoint)
        filled(client)
        threading.Timer(0.2, engine.close).start()
        assert client.resize(small, timeout_ms=10_000).text == ""
        assert populated(daemon) <= small


def test_leased_experts_stay_until_they_are_released(daemon, checkpoint, sizes):
    small, _, _ = sizes
    with ExpertClient(daemon.runtime_dir) as client:
        filled(client)
        top = max(patient(client.keys).tolist(), key=lambda key: key[2])
        leases = client.fetch([top[:2]])
        assert "1 slots are still in use" in client.resize(small, timeout_ms=300).text
        client.check(leases[0])
        wanted = expert_bytes(checkpoint, top[0], top[1])
        assert slot_bytes(client, leases[0].slot) == wanted
        client.release(leases)
        assert client.resize(small, timeout_ms=5000).text == ""


def test_another_size_is_refused_while_a_resize_is_under_way(daemon, checkpoint, sizes):
    small, _, most = sizes
    with (
        engine_of(daemon.runtime_dir, checkpoint),
        ExpertClient(daemon.runtime_dir) as client,
    ):
        filled(client)
        client.resize(small, timeout_ms=100)
        assert "is under way" in client.resize(most).text


def test_what_was_worth_more_than_the_rest_is_read_again_after_a_shrink(daemon, checkpoint, sizes):
    small, _, _ = sizes
    with (
        ExpertClient(daemon.runtime_dir) as client,
    ):
        filled(client)
        hot = [
            tuple(key[:2]) for key in sorted(patient(client.keys).tolist(), key=lambda k: -k[2])[:4]
        ]
        for _ in range(8):
            client.release(client.fetch(hot))
        assert client.resize(small).text == ""
        end = time.monotonic() + 10
        while not set(hot) <= {tuple(key[:2]) for key in patient(client.keys).tolist()}:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_a_live_size_outlives_the_daemon_until_the_settings_change(
    model, checkpoint, runtime_dir, sizes
):
    small, large, most = sizes
    flags = ["--arena", str(large), "--arena-max", str(most)]
    daemon = DaemonProcess(model, runtime_dir, *flags)
    try:
        daemon.start()
        with ExpertClient(runtime_dir) as client:
            filled(client)
            shrunk = client.resize(small)
            kept = patient(client.stats)["n_resident"]
        daemon.kill()
        daemon.start()
        with ExpertClient(runtime_dir) as client:
            stats = patient(client.stats)
            assert stats["arena_bytes"] == shrunk.n_bytes
            assert stats["n_resident"] == kept
            check_bytes(client, checkpoint)
        daemon.stop()
        daemon._command[-3] = str(large + 40960)  # the settings change: they win
        daemon.start()
        with ExpertClient(runtime_dir) as client:
            assert patient(client.stats)["arena_bytes"] > large
    finally:
        daemon.close()


def test_a_daemon_killed_in_mid_resize_leaves_an_arena_of_one_size_or_the_other(
    model, checkpoint, runtime_dir, sizes
):
    small, large, most = sizes
    flags = ["--arena", str(large), "--arena-max", str(most)]
    daemon = DaemonProcess(model, runtime_dir, *flags)
    try:
        daemon.start()
        with engine_of(runtime_dir, checkpoint) as engine, ExpertClient(runtime_dir) as client:
            filled(client)
            before = patient(client.stats)["n_slots"]
            client.resize(small, timeout_ms=200)  # the engine acknowledges nothing
            daemon.kill()
            daemon.start()
            engine.reconnect(5000)
            engine.applied = engine.welcome.version
            assert engine.welcome.n_slots == before
            engine.ack(engine.applied)
            check_bytes(engine, checkpoint)
            with ExpertClient(runtime_dir) as again:
                again.resize(most, timeout_ms=400)  # populated, but not registered
            daemon.kill()
            daemon.start()
            engine.reconnect(5000)
            assert engine.welcome.n_slots > before  # the Welcome is what tells the engine
            engine.applied = engine.welcome.version
            engine.ack(engine.applied)
            check_bytes(engine, checkpoint)
            with ExpertClient(runtime_dir) as again:
                assert again.resize(most).text == ""
                filled(again)
                check_bytes(again, checkpoint)
    finally:
        daemon.close()


def test_smaller_settings_at_a_restart_keep_the_experts_that_have_a_place(
    model, checkpoint, runtime_dir, sizes
):
    small, large, most = sizes
    flags = ["--arena", str(large), "--arena-max", str(most)]
    daemon = DaemonProcess(model, runtime_dir, *flags)
    try:
        daemon.start()
        with ExpertClient(runtime_dir) as client:
            filled(client)
        daemon.stop()
        daemon._command[-3] = str(small)
        daemon.start()
        with ExpertClient(runtime_dir) as client:
            stats = patient(client.stats)
            assert stats["arena_bytes"] <= small
            assert stats["n_resident"] > stats["n_slots"] // 2
            check_bytes(client, checkpoint)
    finally:
        daemon.close()


class Asking:
    """A client that sends Resizes and does not wait for what comes of them."""

    def __init__(self, daemon):
        self.raw = RawClient(daemon.runtime_dir)
        self.welcome = self.raw.ask(hello())
        self.life = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.life.connect(str(daemon.runtime_dir / "arena.sock"))
        self.life.send(AttachRequest(self.welcome.session, self.welcome.generation).pack())
        self.life.recv(256)

    def say(self, message):
        self.raw.send(encode(message, self.welcome.session, self.welcome.generation))

    def resized(self):
        """The next answer, as (request, text)."""
        answer = self.raw.answer()
        assert isinstance(answer, m.Resized), answer
        return answer.request, answer.text

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.life.close()
        self.raw.__exit__(*error)


def until_under_way(daemon, client):
    """Wait until the daemon has begun the last Resize."""
    end = time.monotonic() + 10
    while daemon.daemon._server._resizes._change is None:
        assert time.monotonic() < end
        patient(client.ping)


def test_a_shrink_that_a_lease_holds_up_ends_by_a_resize_back_up(daemon, checkpoint, sizes):
    small, large, _ = sizes
    with ExpertClient(daemon.runtime_dir) as client, Asking(daemon) as other:
        before = filled(client)
        top = max(patient(client.keys).tolist(), key=lambda key: key[2])
        leases = client.fetch([top[:2]])
        other.say(m.Resize(1, small))
        until_under_way(daemon, client)
        back = client.resize(large, timeout_ms=5000)
        assert (back.text, back.n_bytes) == ("", before["arena_bytes"])
        request, text = other.resized()
        assert request == 1
        assert "was given up" in text
        client.check(leases[0])
        client.release(leases)
        stats = filled(client)
        for name in ("n_slots", "n_resident", "arena_bytes"):
            assert stats[name] == before[name]
        check_bytes(client, checkpoint)
        assert client.resize(small).text == ""


def test_what_a_shrink_given_up_has_displaced_is_read_again(daemon, sizes):
    small, large, _ = sizes
    with ExpertClient(daemon.runtime_dir) as client:
        filled(client)
        residents = patient(client.keys).tolist()
        n_slots = daemon.daemon._server._works.size.plan(small).n_slots
        displaced = {tuple(key[:2]) for key in residents if key[2] >= n_slots}
        leases = client.fetch([max(residents, key=lambda key: key[2])[:2]])
        client.resize(small, timeout_ms=100)
        kept = {tuple(key[:2]) for key in patient(client.keys).tolist()}
        assert len(displaced & kept) == 1  # what is leased
        assert client.resize(large, timeout_ms=5000).text == ""
        end = time.monotonic() + 10
        while not displaced <= {tuple(key[:2]) for key in patient(client.keys).tolist()}:
            assert time.monotonic() < end
            time.sleep(0.01)
        client.release(leases)


def test_a_shrink_may_become_a_smaller_one(daemon, checkpoint, sizes):
    small, _, _ = sizes
    between = small + (100 << 10)
    with ExpertClient(daemon.runtime_dir) as client, Asking(daemon) as other:
        filled(client)
        top = max(patient(client.keys).tolist(), key=lambda key: key[2])
        leases = client.fetch([top[:2]])
        other.say(m.Resize(1, small))
        until_under_way(daemon, client)
        other.say(m.Resize(2, between))
        request, text = other.resized()
        assert request == 1
        assert "was given up" in text
        client.release(leases)
        assert other.resized() == (2, "")
        stats = filled(client)
        assert between - stats["slot_bytes"] < stats["arena_bytes"] <= between
        check_bytes(client, checkpoint)


def test_a_shrink_that_the_engine_was_told_of_is_not_given_up(daemon, checkpoint, sizes):
    small, large, _ = sizes
    with (
        engine_of(daemon.runtime_dir, checkpoint) as engine,
        ExpertClient(daemon.runtime_dir) as client,
    ):
        client.resize(small, timeout_ms=300)  # no slot is in use: Drop is sent at once
        refused = client.resize(large, timeout_ms=5000).text
        assert "is under way, the engine has not answered yet" in refused
        (drop,) = engine.memory_changes()
        engine.dropped(drop)
        assert client.resize(small, timeout_ms=5000).text == ""
        assert populated(daemon) <= small


@pytest.fixture
def growing(daemon, checkpoint, sizes):
    """(engine, client, other): `other` waits with request 1 for a grow that was told of."""
    with (
        engine_of(daemon.runtime_dir, checkpoint) as engine,
        ExpertClient(daemon.runtime_dir) as client,
        Asking(daemon) as other,
    ):
        filled(client)
        engine.applied = engine.resync().version
        other.say(m.Resize(1, sizes[2]))
        until_under_way(daemon, client)
        end = time.monotonic() + 10
        while not daemon.daemon._server._resizes._change.told:
            assert time.monotonic() < end
            patient(client.ping)
        yield engine, client, other


def test_a_grow_that_is_not_acknowledged_is_undone_by_a_resize_back(
    daemon, checkpoint, sizes, growing
):
    _, large, _ = sizes
    engine, client, other = growing
    n_slots = engine.welcome.n_slots
    memory = populated(daemon)
    waiting = client.resize(large, timeout_ms=300)  # the engine does not answer: it is said so
    assert waiting.text.endswith("goes on: the engine has not answered yet")
    request, text = other.resized()
    assert request == 1
    assert "was given up" in text
    assert populated(daemon) == memory  # what the engine may have registered has no hole
    added, drop = engine.memory_changes()
    assert (type(added), type(drop)) == (m.Added, m.Drop)
    assert (drop.chunks, drop.n_slots) == (added.chunks, n_slots)
    engine.added(added)
    engine.ack(engine.applied)  # too late: the slots are not used
    filled(client)
    assert max(patient(client.keys)["slot"].tolist()) < n_slots
    assert populated(daemon) == memory
    engine.dropped(drop)
    assert client.resize(large, timeout_ms=5000).text == ""
    assert populated(daemon) <= large
    check_bytes(client, checkpoint)
    assert client.resize(large).text == ""
    assert patient(client.stats)["n_slots"] == n_slots


def test_a_grow_that_is_not_acknowledged_is_undone_when_its_engine_has_gone(
    daemon, checkpoint, sizes, growing
):
    small, large, _ = sizes
    engine, client, _ = growing
    assert "has not answered yet" in client.resize(large, timeout_ms=300).text
    engine.close()
    assert client.resize(large, timeout_ms=5000).text == ""
    assert populated(daemon) <= large
    assert client.resize(small, timeout_ms=5000).text == ""
    check_bytes(client, checkpoint)


def test_slots_that_no_engine_has_acknowledged_are_not_used_by_a_shrink_that_is_given_up(
    daemon, checkpoint, sizes, growing
):
    small, large, most = sizes
    engine, client, other = growing
    n_slots = engine.welcome.n_slots
    other.say(m.Resize(2, small))  # its slots are still in the engine's table: no Drop yet
    assert other.resized()[0] == 1
    assert "is under way" in client.resize(most).text
    assert "is under way" in client.resize(most - 8192).text
    assert "goes on" in client.resize(large, timeout_ms=300).text
    assert "was given up" in other.resized()[1]
    assert daemon.daemon.cache.n_slots == n_slots
    changes = engine.memory_changes()
    assert [type(one) for one in changes] == [m.Added, m.Drop]
    engine.added(changes[0])
    engine.dropped(changes[1])
    assert client.resize(large, timeout_ms=5000).text == ""
    assert populated(daemon) <= large


def test_a_session_waits_with_one_resize_and_one_that_left_with_none(daemon, sizes):
    small, _, _ = sizes
    resizes = daemon.daemon._server._resizes
    with ExpertClient(daemon.runtime_dir) as client:
        filled(client)
        top = max(patient(client.keys).tolist(), key=lambda key: key[2])
        leases = client.fetch([top[:2]])
        with Asking(daemon) as gone:
            gone.say(m.Resize(1, small))
            until_under_way(daemon, client)
        end = time.monotonic() + 10
        while patient(client.stats)["n_clients"] > 1:
            assert time.monotonic() < end
        with Asking(daemon) as other:
            for number in range(1, 51):
                other.say(m.Resize(number, small))
            for number in range(1, 50):
                request, text = other.resized()
                assert (request, text) == (number, f"request {number + 1} waits for it instead")
            patient(client.stats)  # the loop has seen to the last one by its answer
            assert resizes._change.waiters == {other.welcome.session: 50}
            client.release(leases)
            assert other.resized() == (50, "")


def test_lines_about_resizes_are_so_many_a_minute(daemon, sizes, capfd):
    small, large, _ = sizes
    with ExpertClient(daemon.runtime_dir) as client:
        for _ in range(CLIENT_LINES_A_MINUTE):
            assert client.resize(small).text == ""
            assert client.resize(large).text == ""
    flush()
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("resiz")]
    assert 2 <= len(lines) <= CLIENT_LINES_A_MINUTE
