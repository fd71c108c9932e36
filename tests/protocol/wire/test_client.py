from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol.arena.fds import create_arena, send_descriptor
from protocol.arena.layout import read_identity, write_identity
from protocol.errors import (
    ConfigError,
    DaemonBusy,
    DaemonLost,
    LeaseLost,
    ProtocolError,
    ShardError,
)
from protocol.wire import limits
from protocol.wire import messages as m
from protocol.wire.client import ExpertClient
from tests.support.fake_daemon import (
    FINGERPRINT,
    LAYOUT,
    FakeDaemon,
    expert_bytes,
    no_answer,
    refuse,
    row_bytes,
)

ROOT = Path(__file__).parents[3]


@pytest.fixture
def daemon(runtime_dir: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(runtime_dir) as running:
        yield running


@pytest.fixture
def reader(daemon: FakeDaemon, runtime_dir: Path) -> Iterator[ExpertClient]:
    with ExpertClient(runtime_dir) as client:
        yield client


@pytest.fixture
def engine(daemon: FakeDaemon, runtime_dir: Path) -> Iterator[ExpertClient]:
    with ExpertClient(runtime_dir, "engine", FINGERPRINT, 6) as client:
        yield client


@pytest.fixture
def short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.wire.requests.CANCEL_MS", 150)
    monkeypatch.setattr("protocol.wire.connection.BYE_MS", 50)


def _eventually(condition: Any, timeout_s: float = 5) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "never came true"
        time.sleep(0.005)


def _polled(client: ExpertClient) -> bool:
    client.poll()
    return True


def _received(daemon: FakeDaemon, kind: type) -> list[Any]:
    return [message for message in daemon.received if isinstance(message, kind)]


def _descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def _within(seconds: float) -> Any:
    class Clock:
        def __enter__(self) -> None:
            self.began = time.monotonic()

        def __exit__(self, *_: object) -> None:
            assert time.monotonic() - self.began < seconds

    return Clock()


# Hello to Bye


def test_docstring_example_works(daemon: FakeDaemon, runtime_dir: Path) -> None:
    assert ExpertClient.__doc__ is not None
    example = textwrap.dedent(ExpertClient.__doc__.partition("Engram rows:\n")[2])
    assert sum(bool(line.strip()) for line in example.splitlines()) == 20
    done = subprocess.run(
        [sys.executable, "-c", f"{example}\nshow({str(runtime_dir)!r})"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[2] == f"0 1 3000 {7 * 1000}"
    assert lines[3:] == [f"1 3 3000 {52 * 1000}", "1000", "(2, 36)"]
    _eventually(lambda: not daemon.sessions)


def test_no_daemon_is_daemon_lost_within_the_deadline(runtime_dir: Path) -> None:
    before = _descriptors()
    with _within(1), pytest.raises(DaemonLost) as caught:
        ExpertClient(runtime_dir, hello_ms=200)
    assert str(runtime_dir / "expertd.sock") in str(caught.value)
    assert "no daemon accepted a connection within 200 ms" in str(caught.value)
    assert _descriptors() == before


def test_daemon_that_does_not_answer_hello_is_lost(daemon: FakeDaemon, runtime_dir: Path) -> None:
    daemon.silent = True
    with _within(1), pytest.raises(DaemonLost, match="no answer to Hello within 200 ms"):
        ExpertClient(runtime_dir, hello_ms=200)


def test_hello_that_a_dying_daemon_heard_is_said_again_to_its_successor(
    daemon: FakeDaemon, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protocol.wire.greeting.HELLO_AGAIN_MS", 300)
    successors: list[FakeDaemon] = []
    daemon.on[m.Hello] = no_answer
    timer = threading.Timer(0.1, lambda: successors.append(daemon.restart()))
    timer.start()
    with _within(3), ExpertClient(runtime_dir, hello_ms=5000) as client:
        assert client.welcome.generation == 2
    timer.join()
    successors[0].close()


def test_client_waits_for_a_daemon_that_starts_later(runtime_dir: Path) -> None:
    found: list[str] = []

    def connect() -> None:
        with ExpertClient(runtime_dir, hello_ms=5000) as client:
            found.append(client.stats()["policy"])

    thread = threading.Thread(target=connect)
    thread.start()
    time.sleep(0.2)
    with FakeDaemon(runtime_dir):
        thread.join(10)
    assert found == ["none"]


def test_path_that_is_too_long_is_refused_before_anything_is_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has \d+ bytes, wanted at most 100"):
        ExpertClient(tmp_path / ("x" * 90))


def test_unknown_role_is_refused(runtime_dir: Path) -> None:
    with pytest.raises(ConfigError, match="engine, reader"):
        ExpertClient(runtime_dir, "king")


@pytest.mark.parametrize("reason", ["version", "fingerprint", "layout", "role", "limit"])
def test_refused_hello_names_reason_and_text(
    daemon: FakeDaemon, runtime_dir: Path, reason: str
) -> None:
    daemon.on[m.Hello] = refuse(reason, "daemon has 2.0, client has 1.0")
    with pytest.raises(ProtocolError, match=rf"refused \({reason}\): daemon has 2\.0, client"):
        ExpertClient(runtime_dir)


def test_second_engine_waits_until_the_first_has_gone(
    daemon: FakeDaemon, runtime_dir: Path
) -> None:
    refusals: list[int] = []

    def busy(_daemon: Any, _session: Any, _message: Any) -> list[Any] | None:
        refusals.append(1)
        return [m.Refused("busy", "another engine", 20, 4321)] if len(refusals) < 4 else None

    daemon.on[m.Hello] = busy
    with ExpertClient(runtime_dir, "engine", FINGERPRINT):
        assert len(refusals) == 4
    daemon.on[m.Hello] = refuse("busy", "another engine", 20, 4321)
    with _within(4), pytest.raises(DaemonBusy, match=r"another engine \(pid 4321\)"):
        ExpertClient(runtime_dir, "engine", FINGERPRINT, hello_ms=600)


def test_an_engine_whose_last_hello_has_no_time_for_an_answer_is_told_who_is_in_the_way(
    daemon: FakeDaemon, runtime_dir: Path
) -> None:
    said: list[int] = []

    def busy_once(_daemon: Any, _session: Any, _message: Any) -> list[Any]:
        said.append(1)
        return [m.Refused("busy", "another engine", 20, 4321)] if len(said) == 1 else []

    daemon.on[m.Hello] = busy_once
    with _within(4), pytest.raises(DaemonBusy, match=r"another engine \(pid 4321\)"):
        ExpertClient(runtime_dir, "engine", FINGERPRINT, hello_ms=120)
    assert len(said) == 2


def test_hello_says_who_we_are(daemon: FakeDaemon, engine: ExpertClient) -> None:
    hello = daemon.received[0]
    assert hello == m.Hello(m.PROTOCOL_VERSION, "engine", FINGERPRINT, b"", 6, os.getpid())
    assert engine.welcome.arena_id == daemon.arena_id
    assert engine.welcome.n_layers == LAYOUT.n_layers


def test_close_says_bye_and_leaves_nothing_open(daemon: FakeDaemon, runtime_dir: Path) -> None:
    before = _descriptors()
    client = ExpertClient(runtime_dir)
    client.close()
    client.close()
    assert isinstance(daemon.received[-1], m.Bye)
    _eventually(lambda: not daemon.sessions)
    assert _descriptors() == before
    with pytest.raises(DaemonLost, match="was told Bye"):
        client.stats()


def test_close_never_waits_long_for_a_daemon_that_is_stuck(
    daemon: FakeDaemon, runtime_dir: Path
) -> None:
    client = ExpertClient(runtime_dir)
    daemon.on[m.Bye] = no_answer
    with _within(1):
        client.close()


@pytest.mark.parametrize("ending", ["", "client.close()", "raise SystemExit", "os._exit(0)"])
def test_program_that_forgets_to_close_still_ends(
    daemon: FakeDaemon, runtime_dir: Path, ending: str
) -> None:
    code = f"""
import os
from protocol.wire.client import ExpertClient
client = ExpertClient({str(runtime_dir)!r})
view = client.slot_view(0)
{ending}
"""
    with _within(15):
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=15, check=True)
    _eventually(lambda: not daemon.sessions)


# The arena


def test_reader_can_write_nowhere(reader: ExpertClient) -> None:
    for array in (reader.arena.table, reader.arena.headers, reader.arena.tier, reader.arena.ring):
        assert not array.flags.writeable
    assert reader.slot_view(0).gate.readonly
    with pytest.raises(OSError):
        os.pwrite(reader.arena_descriptor, b"x", 0)


def test_engine_can_write_its_own_pages_alone(daemon: FakeDaemon, engine: ExpertClient) -> None:
    engine.arena.tier[2, 3] = 2
    engine.arena.epochs[1] = 77
    assert daemon.view.tier[2, 3] == 2
    assert daemon.view.epochs[1] == 77
    assert not engine.arena.table.flags.writeable
    assert engine.arena.slot(0).readonly
    os.pwrite(engine.arena_descriptor, b"", 0)  # it holds what a restarted daemon would need


def test_arena_that_is_not_as_announced_is_refused(daemon: FakeDaemon, runtime_dir: Path) -> None:
    before = _descriptors()
    identity = read_identity(daemon.memory)
    write_identity(daemon.memory, replace(identity, layout_version=(9, 1)))
    with pytest.raises(ProtocolError, match=r"layout 9\.1, this program has 2\.0"):
        ExpertClient(runtime_dir)
    write_identity(daemon.memory, replace(identity, arena_id=b"z" * 16))
    with pytest.raises(ProtocolError, match=r"arena 7a7a.*announced"):
        ExpertClient(runtime_dir)
    _eventually(lambda: _descriptors() == before)


def test_wrong_descriptors_are_refused_before_use(daemon: FakeDaemon, runtime_dir: Path) -> None:
    def text(_daemon: Any, _session: Any, connection: Any) -> None:
        connection.send(b"not today")

    def small(_daemon: Any, _session: Any, connection: Any) -> None:
        descriptor = create_arena(4096)
        send_descriptor(connection, descriptor, b"arena")
        os.close(descriptor)

    def plain_file(_daemon: Any, _session: Any, connection: Any) -> None:
        with Path(__file__).open() as file:
            send_descriptor(connection, file.fileno(), b"arena")

    def hang_up(_daemon: Any, session: Any, connection: Any) -> None:
        connection.close()
        session.connection = None

    for way, error, word in (
        (text, DaemonLost, "refused: not today"),
        (small, ProtocolError, "has 4096 bytes, announced"),
        (plain_file, ProtocolError, "seal"),
        (hang_up, DaemonLost, "hung up|reset"),
    ):
        daemon.on_attach = way
        with pytest.raises(error, match=word):
            ExpertClient(runtime_dir)


def test_descriptor_that_never_comes_is_a_lost_daemon(
    daemon: FakeDaemon, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protocol.wire.greeting.ATTACH_MS", 150)
    daemon.on_attach = lambda _daemon, _session, _connection: None
    with _within(1), pytest.raises(DaemonLost, match=r"no answer in 0\.1"):
        ExpertClient(runtime_dir)


def test_welcome_that_contradicts_the_arena_is_refused(
    daemon: FakeDaemon, runtime_dir: Path
) -> None:
    def other(daemon: FakeDaemon, session: Any, _message: Any) -> list[Any]:
        daemon.sessions[session.route] = session
        values = daemon.welcome(session)
        return [m.Welcome(**{**_fields(values), "slot_bytes": 8192})]

    daemon.on[m.Hello] = other
    with pytest.raises(ProtocolError, match="Welcome says slot_bytes 8192, the arena's page 4096"):
        ExpertClient(runtime_dir)


def _fields(message: Any) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__dataclass_fields__}


# The engine


@pytest.mark.parametrize("spins", [False, True])
def test_miss_returns_the_slots_and_the_bytes_are_there(engine: ExpertClient, spins: bool) -> None:
    engine.spins = spins
    answer = engine.miss(1, (0, 3, 5), busy=(9,), step=4, hints=[(2, 1)])
    assert answer.final and not answer.errors
    for expert, slot in zip((0, 3, 5), answer.slots, strict=True):
        assert bytes(engine.arena.piece(slot, "up")) == expert_bytes(1, expert, "up")
        assert (1, expert, slot) in answer.changes
    assert engine.applied == 0


def test_what_is_done_meanwhile_is_done_once_the_request_has_left(
    daemon: FakeDaemon, engine: ExpertClient
) -> None:
    arrived = threading.Event()

    def answers(daemon: Any, session: Any, message: Any) -> Any:
        arrived.set()
        return daemon.on_missrequest(session, message)

    daemon.on[m.MissRequest] = answers
    seen: list[bool] = []
    assert engine.miss(1, (3,), meanwhile=lambda: seen.append(arrived.wait(5))).slots
    assert seen == [True]


def test_a_window_in_which_something_failed_meanwhile_is_closed_before_the_next(
    daemon: FakeDaemon, engine: ExpertClient
) -> None:
    told: list[int] = []

    def cancelled(_daemon: Any, _session: Any, message: Any) -> list[Any]:
        told.append(message.request)
        return [m.SlotChanges(message.request, 0, 1, (-1,), (), (), 0, 0.0, True)]

    def fails() -> None:
        raise ConfigError("a chunk cannot be registered")

    daemon.on[m.MissRequest] = no_answer
    daemon.on[m.Cancel] = cancelled
    with pytest.raises(ConfigError, match="a chunk"):
        engine.miss(1, (3,), meanwhile=fails)
    del daemon.on[m.MissRequest]
    assert engine.miss(1, (3,)).slots
    assert told == [1]


def test_miss_takes_numpy_integers_and_sends_what_the_engine_knows(
    daemon: FakeDaemon, engine: ExpertClient
) -> None:
    daemon.version = 9
    engine.applied = 7
    engine.ack(8, 5)
    engine.miss(np.int64(1), np.array([0, 3]), busy=np.array([4]))
    request = daemon.received[-1]
    assert (request.applied, request.epoch_done, request.busy) == (8, 5, (4,))
    assert daemon.received[-2] == m.Ack(8, 5, LAYOUT.n_slots_max)


def test_errors_of_experts_are_in_the_answer(daemon: FakeDaemon, engine: ExpertClient) -> None:
    fault = (1, 3, "EIO", "layer 1 expert 3: bad drive")

    def failing(daemon: FakeDaemon, _session: Any, message: Any) -> list[Any]:
        return [m.SlotChanges(message.request, 0, 1, (2, -1), (), (fault,), 0, 0.0, True)]

    daemon.on[m.MissRequest] = failing
    assert engine.miss(1, (0, 3)).errors == (fault,)


@pytest.mark.parametrize("spins", [False, True])
def test_miss_past_its_deadline_is_cancelled_and_its_last_answer_returned(
    daemon: FakeDaemon, engine: ExpertClient, spins: bool
) -> None:
    engine.spins = spins

    def cancelled(_daemon: Any, _session: Any, message: Any) -> list[Any]:
        fault = (1, 3, "CANCELLED", "as asked")
        return [m.SlotChanges(message.request, 0, 1, (-1,), (), (fault,), 0, 0.0, True)]

    daemon.on[m.MissRequest] = no_answer
    daemon.on[m.Cancel] = cancelled
    with _within(2):
        answer = engine.miss(1, (3,), timeout_ms=100)
    assert answer.errors[0][2] == "CANCELLED"
    assert not engine.lost


@pytest.mark.parametrize("spins", [False, True])
def test_miss_that_is_given_up_is_cancelled_long_before_its_deadline(
    daemon: FakeDaemon, engine: ExpertClient, spins: bool
) -> None:
    engine.spins = spins

    def cancelled(_daemon: Any, _session: Any, message: Any) -> list[Any]:
        fault = (1, 3, "CANCELLED", "as asked")
        return [m.SlotChanges(message.request, 0, 1, (-1,), (), (fault,), 0, 0.0, True)]

    daemon.on[m.MissRequest] = no_answer
    daemon.on[m.Cancel] = cancelled
    asked = iter((False, True))
    with _within(2):
        answer = engine.miss(1, (3,), give_up=lambda: next(asked))
    assert answer.errors[0][2] == "CANCELLED"
    assert not engine.lost


@pytest.mark.usefixtures("short_deadlines")
def test_miss_whose_cancel_is_not_answered_loses_the_daemon(
    daemon: FakeDaemon, engine: ExpertClient
) -> None:
    daemon.on[m.MissRequest] = daemon.on[m.Cancel] = no_answer
    with _within(2), pytest.raises(DaemonLost, match=r"neither MissRequest 1 within 100 ms nor"):
        engine.miss(1, (3,), timeout_ms=100)
    assert "neither" in engine.lost
    with pytest.raises(DaemonLost):
        engine.changes()
    _eventually(lambda: not daemon.sessions)


@pytest.mark.parametrize(
    "answer",
    [
        m.SlotChanges(1, 0, 1, (1,), (), (), 0, 0.0, True),
        m.SlotChanges(1, 0, 1, (1, 2), (), (), 0, 0.0, False),
    ],
)
def test_answer_that_does_not_fit_ends_the_session(
    daemon: FakeDaemon, engine: ExpertClient, answer: m.SlotChanges
) -> None:
    daemon.on[m.MissRequest] = lambda _daemon, _session, _message: [answer]
    with pytest.raises(ProtocolError, match="slots for 2 experts"):
        engine.miss(0, (1, 2))
    assert engine.lost


@pytest.mark.parametrize(
    "frame",
    [
        b"garbage",
        b"",
        b"\xc0" * (limits.MAX_FRAME_BYTES + 1),
        # A slot that the arena does not have.
        b"\x9c\x0b\xcc\x65\x01\x01\x00\x01\x91\xcd\x01\x00\x90\x90\x00\xcb" + bytes(8) + b"\xc3",
    ],
)
def test_frame_that_cannot_be_read_ends_the_session(
    daemon: FakeDaemon, engine: ExpertClient, frame: bytes
) -> None:
    daemon.on[m.MissRequest] = lambda _daemon, _session, _message: [frame]
    with pytest.raises(ProtocolError):
        engine.miss(0, (1,))
    assert "cannot be read" in engine.lost


def test_refused_request_is_a_protocol_error_and_the_session_goes_on(
    daemon: FakeDaemon, engine: ExpertClient
) -> None:
    daemon.on[m.MissRequest] = refuse("limit", "7 experts, wanted at most 6")
    with pytest.raises(ProtocolError, match=r"refused \(limit\): 7 experts"):
        engine.miss(0, (1,))
    del daemon.on[m.MissRequest]
    assert engine.miss(0, (1,)).slots


def test_refusal_of_who_knows_what_ends_the_session(
    daemon: FakeDaemon, engine: ExpertClient
) -> None:
    daemon.on[m.MissRequest] = lambda _d, _s, _m: [m.Refused("malformed", "what?", 0, 0)]
    with pytest.raises(ProtocolError, match="what"):
        engine.miss(0, (1,))
    assert engine.lost


def test_changes_that_come_during_a_miss_are_kept_in_order(
    daemon: FakeDaemon, engine: ExpertClient
) -> None:
    first, second = m.Changes(1, 2, ((0, 1, -1),)), m.Changes(2, 3, ())

    def with_changes(daemon: FakeDaemon, session: Any, message: Any) -> list[Any]:
        return [first, second, *daemon.on_missrequest(session, message)]

    assert engine.changes() == []
    daemon.on[m.MissRequest] = with_changes
    engine.miss(0, (1,))
    daemon.push(m.Changes(3, 4, ()))
    _eventually(lambda: _polled(engine) and len(engine._changes) == 3)
    assert engine.changes() == [first, second, m.Changes(3, 4, ())]
    assert engine.changes() == []


def test_resync_brings_the_whole_table_and_drops_older_changes(
    daemon: FakeDaemon, engine: ExpertClient
) -> None:
    slot = engine.miss(2, (7,)).slots[0]
    daemon.push(m.Changes(1, 2, ()))
    _eventually(lambda: _polled(engine) and len(engine._changes) == 1)  # it was there before
    welcome = engine.resync()
    table = np.frombuffer(welcome.table, "<i4").reshape(LAYOUT.n_layers, LAYOUT.n_experts)
    assert table[2, 7] == slot
    assert engine.welcome is welcome
    assert engine.changes() == []


def test_interrupted_miss_is_cancelled_before_the_next(
    daemon: FakeDaemon, engine: ExpertClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_answer", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.miss(0, (1,))
    daemon.on[m.Cancel] = lambda _d, _s, message: [
        m.SlotChanges(message.request, 0, 1, (-1,), (), (), 0, 0.0, True)
    ]
    answer = engine.miss(0, (2,))
    kinds = [type(message).__name__ for message in daemon.received[1:]]
    assert kinds == ["MissRequest", "Cancel", "MissRequest"]
    assert answer.request == 2


def test_touch_is_sorted_and_each_key_once(daemon: FakeDaemon, engine: ExpertClient) -> None:
    engine.touch(5, np.array([[2, 1], [0, 7], [2, 1], [0, 3]], np.uint16))
    engine.touch(6, np.empty((0, 2), np.uint16))
    engine.hint(7, 1, [4, 2, 4])
    engine.ping()
    picks = np.array([[0, 3], [0, 7], [2, 1]], "<u2").tobytes()
    assert daemon.received[1:3] == [m.Touch(5, picks), m.Hint(7, 1, (4, 2))]
    for wrong in ([[3, 0]], [[0, 8]], [[-1, 0]]):
        with pytest.raises(ValueError, match="wanted below"):
            engine.touch(0, wrong)


# Readers


def test_fetch_leases_in_the_order_asked_for(daemon: FakeDaemon, reader: ExpertClient) -> None:
    leases = reader.fetch([(2, 5), (0, 1)])
    assert [(lease.layer, lease.expert) for lease in leases] == [(2, 5), (0, 1)]
    for lease in leases:
        view = reader.slot_view(lease.slot)
        assert bytes(view.gate) == expert_bytes(lease.layer, lease.expert, "gate")
        assert bytes(view.down_scale) == expert_bytes(lease.layer, lease.expert, "down_scale")
        reader.check(lease)
    reader.release(leases)
    reader.ping()
    assert not next(iter(daemon.sessions.values())).leases
    assert reader.fetch([]) == []


def test_lease_is_lost_once_its_slot_holds_something_else(
    daemon: FakeDaemon, reader: ExpertClient
) -> None:
    (lease,) = reader.fetch([(2, 5)])
    daemon.view.headers[lease.slot]["generation"] += 1
    with pytest.raises(LeaseLost, match="layer 2 expert 5: slot 0 is of generation 2"):
        reader.check(lease)
    with pytest.raises(LeaseLost), reader.leased([(0, 1)]) as (held,):
        daemon.view.headers[held.slot]["state"] = 1
    reader.ping()
    assert len(next(iter(daemon.sessions.values())).leases) == 1


def test_fetch_waits_for_room_until_its_deadline(
    daemon: FakeDaemon, reader: ExpertClient, runtime_dir: Path
) -> None:
    leases = reader.fetch([(0, 0), (0, 1), (0, 2)])
    with _within(2), pytest.raises(DaemonBusy, match="no room for 2 leases within 150 ms"):
        reader.fetch([(1, 0), (1, 1)], wait_ms=150)
    reader.release(leases[:2])
    assert len(reader.fetch([(1, 0), (1, 1)], wait_ms=1000)) == 2
    with pytest.raises(ValueError, match="5 keys, a reader may lease 4"):
        reader.fetch([(0, expert) for expert in range(5)])


def test_fetch_gives_back_what_came_beside_an_error(
    daemon: FakeDaemon, reader: ExpertClient
) -> None:
    for code, error in (("EIO", ShardError), ("NO_SLOT", DaemonBusy)):

        def failing(_d: Any, _s: Any, message: Any, code: str = code) -> list[Any]:
            fault = (0, 2, code, "file x: bad")
            return [m.Leased(message.request, ((0, 1, 4, 9),), (fault,))]

        daemon.on[m.Fetch] = failing
        with pytest.raises(error, match=f"layer 0 expert 2: {code}: file x: bad"):
            reader.fetch([(0, 1), (0, 2)])
        reader.ping()
        assert m.Release(((4, 9),)) in daemon.received[-2:]


def test_fetch_that_is_not_answered_is_cancelled(daemon: FakeDaemon, reader: ExpertClient) -> None:
    daemon.on[m.Fetch] = no_answer
    daemon.on[m.Cancel] = lambda _d, _s, message: [
        m.Leased(message.request, (), ((0, 1, "TIMEOUT", "late"),))
    ]
    with _within(2), pytest.raises(DaemonBusy, match="TIMEOUT"):
        reader.fetch([(0, 1)], wait_ms=50)


# Rows, keys, stats, ping


def test_rows_come_in_the_order_asked_for_and_are_copies(
    daemon: FakeDaemon, reader: ExpertClient
) -> None:
    numbers = np.array(
        [5, 3, 5, 900, 0, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19], np.uint32
    )
    rows = reader.rows(1, numbers)
    daemon.view.ring[:] = 0
    assert rows.shape == (18, LAYOUT.row_bytes)
    assert all(bytes(row) == row_bytes(1, int(n)) for row, n in zip(rows, numbers, strict=True))
    reader.ping()
    assert sum(isinstance(message, m.RowsDone) for message in daemon.received) == 3
    assert reader.rows(1, []).shape == (0, LAYOUT.row_bytes)


def test_rows_of_two_requests_may_be_taken_in_any_order(engine: ExpertClient) -> None:
    first = engine.request_rows(0, [1, 2])
    second = engine.request_rows(1, [3])
    assert bytes(engine.take_rows(second)[0]) == row_bytes(1, 3)
    assert bytes(engine.take_rows(first)[1]) == row_bytes(0, 2)
    with pytest.raises(DaemonLost, match="taken already"):
        engine.take_rows(first)


def test_rows_of_several_tables_come_in_one_answer(
    daemon: FakeDaemon, engine: ExpertClient
) -> None:
    rows = engine.take_rows(engine.request_rows(1, [3, 4], [(0, np.array([7]))]))
    wanted = [row_bytes(1, 3), row_bytes(1, 4), row_bytes(0, 7)]
    assert [bytes(row) for row in rows] == wanted
    assert sum(isinstance(message, m.RowRequest) for message in daemon.received) == 1
    with pytest.raises(ValueError, match="9 rows"):
        engine.request_rows(1, range(4), [(0, range(5))])
    with pytest.raises(ProtocolError, match="table twice"):
        engine.request_rows(1, [3], [(1, [4])])


def test_rows_out_of_range_are_refused_before_they_are_sent(engine: ExpertClient) -> None:
    for wrong in ([], range(9), [-1], [1 << 32], [1.5], [[1]]):
        with pytest.raises(ValueError, match="row"):
            engine.request_rows(0, wrong)


def test_bad_row_is_a_shard_error_and_its_ring_rows_are_given_back(
    daemon: FakeDaemon, engine: ExpertClient
) -> None:
    daemon.on[m.RowRequest] = lambda _d, _s, message: [
        m.RowsReady(message.request, 0, 1, ((4, "EIO", "file x offset 9"),))
    ]
    with pytest.raises(ShardError, match="row 4: EIO: file x offset 9"):
        engine.rows(0, [4])
    engine.ping()
    assert m.RowsDone(1) in daemon.received


def test_refused_rows_do_not_disturb_another_wait(daemon: FakeDaemon, engine: ExpertClient) -> None:
    daemon.on[m.RowRequest] = refuse("limit", "too many")
    handle = engine.request_rows(0, [4])
    assert engine.miss(0, (1,)).slots
    with pytest.raises(ProtocolError, match="too many"):
        engine.take_rows(handle)


@pytest.mark.usefixtures("short_deadlines")
def test_rows_that_do_not_come_lose_the_daemon(daemon: FakeDaemon, engine: ExpertClient) -> None:
    daemon.on[m.RowRequest] = no_answer
    handle = engine.request_rows(0, [4])
    with _within(2), pytest.raises(DaemonLost, match="neither RowRequest"):
        engine.take_rows(handle, timeout_ms=100)


def test_rows_that_nobody_waits_for_are_given_back(
    daemon: FakeDaemon, reader: ExpertClient
) -> None:
    daemon.push(m.RowsReady(55, 0, 2, ()))
    daemon.push(m.Leased(56, ((0, 1, 4, 9),), ()))
    _eventually(lambda: _polled(reader) and m.Release(((4, 9),)) in daemon.received)
    assert m.RowsDone(55) in daemon.received


def test_keys_say_what_the_arena_holds(reader: ExpertClient) -> None:
    assert len(reader.keys()) == 0
    (lease,) = reader.fetch([(2, 5)])
    assert reader.keys().tolist() == [(2, 5, lease.slot)]


def test_stats_and_ping_answer_or_raise_in_time(daemon: FakeDaemon, reader: ExpertClient) -> None:
    assert reader.stats()["policy"] == "none"
    assert 0 < reader.ping() < 1000
    daemon.on[m.Stats] = daemon.on[m.Ping] = no_answer
    with _within(2), pytest.raises(DaemonLost, match="no answer to Stats within 1000 ms"):
        reader.stats()
    with _within(1), pytest.raises(DaemonLost, match="no answer to Ping within 50 ms"):
        reader.ping(50)
    assert not reader.lost
    assert len(reader.keys()) == 0


def test_pings_of_the_daemon_are_answered(daemon: FakeDaemon, reader: ExpertClient) -> None:
    daemon.push(m.Ping(9))
    _eventually(lambda: _polled(reader) and m.Pong(9) in daemon.received)


def test_late_answers_are_passed_over(daemon: FakeDaemon, reader: ExpertClient) -> None:
    daemon.push(m.StatList(77, {}))
    daemon.push(m.Answered(78, True, ""))
    _eventually(lambda: _polled(reader) and reader.n_passed_over == 2)
    assert reader.stats()


# The daemon's end


@pytest.mark.parametrize("spins", [False, True])
def test_killed_daemon_is_noticed_at_once_in_a_wait(
    daemon: FakeDaemon, engine: ExpertClient, spins: bool
) -> None:
    engine.spins = spins
    daemon.on[m.MissRequest] = no_answer
    timer = threading.Timer(0.2, daemon.kill)
    timer.start()
    with _within(2), pytest.raises(DaemonLost, match="closed the descriptor connection"):
        engine.miss(0, (1,), timeout_ms=20_000)
    timer.join()
    assert "descriptor connection" in engine.lost
    with pytest.raises(DaemonLost):
        engine.stats()


def test_one_way_messages_to_a_lost_daemon_cost_nothing(
    daemon: FakeDaemon, engine: ExpertClient
) -> None:
    daemon.kill()
    with pytest.raises(DaemonLost):
        engine.changes()
    engine.touch(1, [[0, 1]])
    engine.hint(1, 0, [1])
    engine.release([])
    with pytest.raises(DaemonLost):
        engine.ack(1)


def test_reconnect_keeps_the_mapping_where_the_daemon_kept_the_arena(
    daemon: FakeDaemon, engine: ExpertClient
) -> None:
    slot = engine.miss(1, (2,)).slots[0]
    engine.applied = 5
    view = engine.arena
    with daemon.restart():
        with pytest.raises(DaemonLost):
            engine.changes()
        welcome = engine.reconnect(2000)
        assert (welcome.generation, engine.arena is view, engine.applied) == (2, True, 0)
        table = np.frombuffer(welcome.table, "<i4").reshape(LAYOUT.n_layers, LAYOUT.n_experts)
        assert table[1, 2] == slot
        assert bytes(view.piece(slot, "gate")) == expert_bytes(1, 2, "gate")
        assert engine.miss(1, (2,)).slots == (slot,)


def test_reconnect_says_which_arena_is_still_mapped(
    daemon: FakeDaemon, engine: ExpertClient
) -> None:
    with daemon.restart() as successor:
        engine.reconnect(2000)
        assert successor.received[0].arena_id == daemon.arena_id


def test_new_arena_is_mapped_after_the_engine_let_go_of_the_old(
    daemon: FakeDaemon, engine: ExpertClient
) -> None:
    old = engine.arena
    seen: list[Any] = []
    with daemon.restart(keep_arena=False) as successor:
        engine.reconnect(2000, before_remap=lambda: seen.append(engine.arena))
        assert seen == [old]
        assert engine.arena is not old
        assert engine.arena.identity.tobytes() == successor.view.identity.tobytes()
        assert old.slot(0)[0] == 0  # an old view stays readable until it is dropped
        slot = engine.miss(1, (2,)).slots[0]
        assert bytes(engine.arena.piece(slot, "gate")) == expert_bytes(1, 2, "gate")


def test_reconnect_without_a_daemon_ends_at_its_deadline(
    daemon: FakeDaemon, engine: ExpertClient
) -> None:
    daemon.kill()
    for _ in range(3):
        with _within(1), pytest.raises(DaemonLost, match="no daemon accepted"):
            engine.reconnect(100)
    assert engine.lost
    assert os.fstat(engine.arena_descriptor).st_size == LAYOUT.n_bytes
    with FakeDaemon(daemon.paths.socket.parent, engine.arena_descriptor, 9):
        assert engine.reconnect(2000).generation == 9


def test_reconnecting_leaks_no_descriptor(daemon: FakeDaemon, engine: ExpertClient) -> None:
    engine.reconnect(2000)
    before = _descriptors()
    for _ in range(5):
        engine.reconnect(2000)
    _eventually(lambda: _descriptors() <= before)


def test_row_handles_do_not_outlive_their_session(daemon: FakeDaemon, engine: ExpertClient) -> None:
    handle = engine.request_rows(0, [1])
    with daemon.restart():
        engine.reconnect(2000)
        with pytest.raises(DaemonLost, match="not asked for in this session"):
            engine.take_rows(handle)


@pytest.mark.parametrize("reason", ["hello_first", "stale"])
def test_session_that_the_daemon_forgot_is_lost(
    daemon: FakeDaemon, engine: ExpertClient, reason: str
) -> None:
    daemon.on[m.Stats] = refuse(reason, "say Hello")
    with pytest.raises(DaemonLost, match="knows this session no more: say Hello"):
        engine.stats()
    assert engine.lost


def test_message_of_another_generation_is_a_lost_daemon(
    daemon: FakeDaemon, engine: ExpertClient
) -> None:
    daemon.push(m.Changes(1, 2, ()), generation=8)
    with pytest.raises(DaemonLost, match="is of generation 8, this session of 1"):
        _eventually(lambda: not _polled(engine))


def test_a_welcome_that_answers_no_resync_is_passed_over(
    daemon: FakeDaemon, engine: ExpertClient
) -> None:
    def late(daemon: FakeDaemon, session: Any, message: m.Resync) -> list[Any]:
        old = replace(daemon.welcome(session), version=99, request=message.request - 1)
        return [daemon.welcome(session), old, *daemon.on_resync(session, message)]

    daemon.on[m.Resync] = late
    welcome = engine.resync()
    assert welcome.version == daemon.version
    assert welcome.request > 0


def test_a_welcome_while_a_window_is_open_does_not_close_it(
    daemon: FakeDaemon, engine: ExpertClient
) -> None:
    before = engine.welcome

    def answer(daemon: FakeDaemon, session: Any, message: m.MissRequest) -> list[Any]:
        stale = replace(daemon.welcome(session), request=7)
        return [daemon.welcome(session), stale, *daemon.on_missrequest(session, message)]

    daemon.on[m.MissRequest] = answer
    assert engine.miss(1, (3,)).final
    assert engine.welcome is before


def test_epochs_are_shown_before_anything_of_them_runs_and_begin_at_nothing(
    daemon: FakeDaemon, engine: ExpertClient
) -> None:
    assert daemon.view.epochs[:3].tolist() == [0, 0, 0]
    assert [engine.begin_epoch(), engine.begin_epoch()] == [1, 2]
    assert daemon.view.epochs[2] == 2
    engine.ack(1, 1)
    _eventually(lambda: _received(daemon, m.Ack) == [m.Ack(1, 1, LAYOUT.n_slots_max)])
    assert daemon.view.epochs[:3].tolist() == [1, 1, 2]
    engine.close()
    with ExpertClient(daemon.paths.socket.parent, "engine", FINGERPRINT, 6):
        assert daemon.view.epochs[:3].tolist() == [0, 0, 0]


def test_what_a_resize_asks_is_kept_until_the_engine_takes_it(
    daemon: FakeDaemon, engine: ExpertClient
) -> None:
    daemon.push(m.Drop((1, 2), 5, 3))
    daemon.push(m.Added((1,), 8, 4))
    _eventually(lambda: _polled(engine) and len(engine._memory_changes) == 2)
    drop, added = engine.memory_changes()
    assert isinstance(drop, m.Drop)
    assert isinstance(added, m.Added)
    assert (drop, added) == (m.Drop((1, 2), 5, 3), m.Added((1,), 8, 4))
    engine.dropped(drop)
    engine.added(added)
    engine.ack(1)
    _eventually(lambda: _received(daemon, m.Ack) == [m.Ack(1, 0, 8)])
    assert _received(daemon, m.Dropped) == [m.Dropped((1, 2))]
