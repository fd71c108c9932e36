"""MissClient against a daemon made of a dict: what it asks, what it applies, how it recovers."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest
import torch

from compute.experts.arena_view import PieceShapes
from compute.experts.miss_client import MissClient, RequestCancelled, Waiting
from protocol.arena.layout import ArenaLayout, ArenaView
from protocol.errors import DaemonLost, ProtocolError, ShardError
from protocol.wire.messages import Added, Changes, Drop, SlotChanges, Welcome

N_LAYERS, N_EXPERTS, N_SLOTS, MAX_EXPERTS, ROW_BYTES = 2, 8, 4, 3, 33
SHAPES = ((4, 16), (4, 1), (4, 16), (4, 1), (32, 2), (32, 1))
PLACES = tuple(256 * piece for piece in range(6))
LAYERS = (PieceShapes(PLACES, SHAPES),) * N_LAYERS
LAYOUT = ArenaLayout.plan(
    n_layers=N_LAYERS,
    n_experts=N_EXPERTS,
    n_slots_max=N_SLOTS,
    slot_bytes=4096,
    row_bytes=ROW_BYTES,
    ring_rows=16,
    piece_offsets=PLACES,
    piece_bytes=tuple(out * row for out, row in SHAPES),
)


class FakeStream:
    """Plays `ExpertStream`: two experts a part, in slots that were consumed."""

    def __init__(self, daemon: FakeDaemon, layer: int, experts: tuple[int, ...]) -> None:
        self.daemon, self.layer = daemon, layer
        self.request = SimpleNamespace(experts=experts)
        self.ended = False
        self.n_named = 0
        self.n_consumed = 0
        self.version = self.applied = daemon.applied

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> SlotChanges | None:
        if self.ended:
            return None
        self.daemon.log.append(("cancel", self.layer))
        self.ended = True
        self.daemon.while_cancelling()
        daemon, n = self.daemon, len(self.request.experts)
        return SlotChanges(
            *(1, self.applied, daemon.version, (-1,) * n, daemon.changes_from(self.applied)),
            errors=(), n_bytes=0, read_ms=0.0, final=True,
        )  # fmt: skip

    def __next__(self) -> SlotChanges:
        daemon, experts = self.daemon, self.request.experts
        daemon._fails("part")
        assert self.n_consumed == self.n_named, "a part although nothing was consumed"
        named = experts[self.n_named : self.n_named + 2]
        for expert in named:
            if daemon.table[self.layer, expert] < 0 and (self.layer, expert) not in daemon.bad:
                own = {int(daemon.table[self.layer, e]) for e in named}
                while daemon.next_slot % N_SLOTS in own:
                    daemon.next_slot += 1
                daemon.set(self.layer, expert, daemon.next_slot % N_SLOTS)
                daemon.next_slot += 1
        self.n_named += len(named)
        self.ended = self.n_named == len(experts)
        before, self.version = self.version, daemon.version
        slots = [int(daemon.table[self.layer, e]) if e in named else -1 for e in experts]
        bad = [e for e in named if (self.layer, e) in daemon.bad]
        errors = tuple((self.layer, e, "EIO", "disk says no") for e in bad)
        changes = daemon.changes_from(before)
        return SlotChanges(
            *(1, before, self.version, tuple(slots), changes, errors), 200, 1.0, self.ended
        )

    def consumed(self, up_to: int) -> None:
        self.n_consumed = self.request.experts.index(up_to) + 1


class FakeDaemon:
    """Plays `ExpertClient` and the daemon behind it; evicts in turn, never a request's own key."""

    def __init__(self) -> None:
        self.memory = bytearray(LAYOUT.n_bytes)
        self.arena = ArenaView(self.memory, LAYOUT)
        self.arena_id = b"a" * 16
        self.generation = 1
        self.version = 1
        self.table = np.full((N_LAYERS, N_EXPERTS), -1, "<i4")
        self.changed: dict[tuple[int, int], int] = {}  # key -> version of its last change
        self.pushed: list[Changes] = []
        self.bad: set[tuple[int, int]] = set()
        self.fail_next: list[str] = []  # "miss" / "rows" / "reconnect" calls that lose the daemon
        self.lost_rows = False
        self.lost = ""
        self.applied = -1
        self.log: list[tuple[Any, ...]] = []
        self.rows_asked: dict[int, np.ndarray] = {}
        self.next_slot = 0
        self.epoch = self.epoch_done = 0
        self.resizes: list[Drop | Added] = []
        self.while_waiting: Callable[[], None] = lambda: None
        self.while_cancelling: Callable[[], None] = lambda: None
        self.left_open: SlotChanges | None = None  # the answer of a window that was left open
        self.welcome = self._welcome()

    def _welcome(self) -> Welcome:
        return Welcome(
            session=1,
            generation=self.generation,
            arena_id=self.arena_id,
            arena_bytes=LAYOUT.n_bytes,
            n_layers=N_LAYERS,
            n_experts=N_EXPERTS,
            n_slots=N_SLOTS,
            slot_bytes=4096,
            max_experts=MAX_EXPERTS,
            lease_quota=0,
            descriptor_address="arena.sock",
            version=self.version,
            table=self.table.tobytes(),
            scores=bytes(4 * N_SLOTS),
        )

    def _fails(self, call: str) -> None:
        if self.fail_next[:1] == [call]:
            self.fail_next.pop(0)
            raise DaemonLost(f"{call}: the daemon is gone")

    def set(self, layer: int, expert: int, slot: int) -> None:
        self.version += 1
        if slot >= 0:
            for key in zip(*np.nonzero(self.table == slot), strict=True):
                self.table[key] = -1
                self.changed[int(key[0]), int(key[1])] = self.version
            self.arena.piece(slot, "gate")[0] = 16 * layer + expert
        self.table[layer, expert] = slot
        self.changed[layer, expert] = self.version

    def changes_from(self, applied: int) -> tuple[tuple[int, int, int], ...]:
        keys = sorted(key for key, version in self.changed.items() if version > applied)
        return tuple((*key, int(self.table[key])) for key in keys)

    # the client's methods

    def miss(
        self,
        layer: int,
        experts: tuple[int, ...],
        *,
        step: int,
        busy: tuple[int, ...] = (),
        hints: tuple[tuple[int, int], ...] = (),
        give_up: Callable[[], bool] = lambda: False,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> SlotChanges:
        self._fails("miss")
        self.while_waiting()
        meanwhile()
        assert list(experts) == sorted(set(experts))
        assert len(experts) <= MAX_EXPERTS
        assert not busy
        assert not hints
        self.log.append(("miss", layer, experts, self.applied))
        applied, n_read = self.applied, 0
        for expert in experts:
            if self.table[layer, expert] < 0 and (layer, expert) not in self.bad:
                own = {int(self.table[layer, e]) for e in experts}
                while self.next_slot % N_SLOTS in own:
                    self.next_slot += 1
                self.set(layer, expert, self.next_slot % N_SLOTS)
                self.next_slot += 1
                n_read += 1
        errors = tuple(
            (layer, expert, "EIO", "disk says no")
            for expert in experts
            if (layer, expert) in self.bad
        )
        if give_up():
            errors = ((layer, experts[0], "CANCELLED", "as asked"),)
        return SlotChanges(
            request=1,
            from_version=applied,
            to_version=self.version,
            slots=tuple(int(self.table[layer, e]) for e in experts),
            changes=self.changes_from(applied),
            errors=errors,
            n_bytes=100 * n_read,
            read_ms=1.0,
            final=True,
        )

    def changes(self) -> list[Changes]:
        pushed, self.pushed = self.pushed, []
        return pushed

    def push(self) -> None:
        self.pushed.append(Changes(self.applied, self.version, self.changes_from(self.applied)))

    def ack(self, applied: int) -> None:
        self.log.append(("ack", applied))

    def begin_epoch(self) -> int:
        self.epoch += 1
        return self.epoch

    def memory_changes(self) -> list[Drop | Added]:
        asked, self.resizes = self.resizes, []
        return asked

    def dropped(self, drop: Drop) -> None:
        self.log.append(("dropped", drop.chunks))

    def added(self, added: Added) -> None:
        self.log.append(("added", added.chunks))

    def close_window(self) -> SlotChanges | None:
        answer, self.left_open = self.left_open, None
        return answer

    def stream(self, layer: int, experts: list[int], **how: Any) -> FakeStream:
        self._fails("stream")
        assert list(experts) == sorted(set(experts))
        self.log.append(("stream", layer, tuple(experts), how["ahead"]))
        return FakeStream(self, layer, tuple(experts))

    def touch(self, step: int, picks: np.ndarray) -> None:
        self.log.append(("touch", step, [tuple(pick) for pick in picks.tolist()]))

    def resync(self) -> Welcome:
        self.log.append(("resync",))
        return self._welcome()

    def reconnect(self, *, timeout_ms: int) -> None:
        self._fails("reconnect")
        self.generation += 1
        self.rows_asked.clear()
        self.log.append(("reconnect",))
        self.welcome = self._welcome()

    top_k_batch = MAX_EXPERTS
    max_rows = LAYOUT.ring_rows // 4

    def request_rows(self, table: int, rows: np.ndarray, others: Any = ()) -> int:
        self._fails("rows")
        assert rows.dtype == np.uint32
        all_rows = np.concatenate([rows, *(more for _, more in others)])
        assert 1 <= len(all_rows) <= self.max_rows
        handle = len(self.log)
        self.log.append(("rows", table, rows.tolist(), *((t, r.tolist()) for t, r in others)))
        self.rows_asked[handle] = all_rows
        return handle

    def take_rows(self, handle: int) -> np.ndarray:
        self._fails("take")
        rows = self.rows_asked.pop(handle)
        return np.repeat(rows.astype(np.uint8)[:, None], ROW_BYTES, axis=1)

    def named(self, kind: str) -> list[tuple[Any, ...]]:
        return [entry for entry in self.log if entry[0] == kind]


def _pair(**waiting: Any) -> tuple[FakeDaemon, MissClient]:
    daemon = FakeDaemon()
    settings = {"daemon_wait_s": 1.0} | waiting
    return daemon, MissClient(daemon, LAYERS, Waiting(**settings))  # type: ignore[arg-type]


def _streamed(source: MissClient, layer: int, experts: list[int]) -> list[tuple[int, int]]:
    """(expert, the mark in its slot while it is in use)."""
    return [(e, int(m.gate[0, 0])) for e, m in source.stream(layer, experts)]


def test_a_layer_that_is_present_sends_no_message() -> None:
    daemon, source = _pair()
    _streamed(source, 0, [1, 2])
    before = len(daemon.log)
    assert _streamed(source, 0, [1, 2]) == [(1, 1), (2, 2)]
    assert len(daemon.log) == before
    assert (source.io.hits, source.io.misses, source.io.bytes_read) == (2, 2, 200)


def test_a_request_carries_all_picks_of_the_layer_hits_included() -> None:
    daemon, source = _pair()
    _streamed(source, 1, [1])
    assert _streamed(source, 1, [0, 1, 2]) == [(0, 16), (1, 17), (2, 18)]
    assert [entry[1:3] for entry in daemon.named("miss")] == [(1, (1,)), (1, (0, 1, 2))]
    assert (source.io.hits, source.io.misses) == (1, 3)


def test_where_every_expert_is_can_be_told_for_eyes() -> None:
    _, source = _pair()
    assert source.tiers() == bytes(N_LAYERS * N_EXPERTS)
    _streamed(source, 1, [0, 2])
    found = np.frombuffer(source.tiers(), np.uint8).reshape(N_LAYERS, N_EXPERTS)
    assert np.argwhere(found == 1).tolist() == [[1, 0], [1, 2]]


def test_time_to_copy_to_a_device_is_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    _, source = _pair()
    _streamed(source, 0, [1, 2])
    assert source.io.copy_ms == 0
    monkeypatch.setattr(type(source._views), "copies", True)
    _streamed(source, 0, [1, 2])
    _streamed(source, 1, list(range(8)))
    assert 0 < source.io.copy_ms < 1000


def test_more_experts_than_a_token_picks_come_through_a_stream() -> None:
    daemon, source = _pair()
    assert _streamed(source, 0, list(range(8))) == [(e, e) for e in range(8)]
    assert daemon.named("miss") == []
    ahead = [(1, expert) for expert in range(8)]
    assert daemon.named("stream") == [("stream", 0, tuple(range(8)), ahead)]
    assert source.io.misses == 8
    assert source.io.bytes_read == 800
    assert daemon.named("ack") == [("ack", daemon.version)]


def test_the_last_layer_and_few_picks_foresee_nothing() -> None:
    daemon, source = _pair()
    source._expected(1, 8)
    assert source._expected(2, 8) == []
    assert source._expected(1, 5) == []
    assert len(source._expected(1, 6)) == 8
    assert daemon.named("stream") == []


def test_a_stream_whose_daemon_is_lost_goes_on_with_the_next_expert() -> None:
    daemon, source = _pair()
    stream = source.stream(0, list(range(8)))
    seen = [next(stream) for _ in range(3)]
    daemon.fail_next = ["part", "reconnect", "stream"]
    seen += list(stream)
    assert [expert for expert, _ in seen] == list(range(8))
    assert [entry[2] for entry in daemon.named("stream")] == [tuple(range(8)), (4, 5, 6, 7)]
    assert source.n_daemons_lost == 2


def test_a_stream_that_meets_a_bad_expert_is_cancelled_and_names_it() -> None:
    daemon, source = _pair()
    daemon.bad = {(0, 3)}
    with pytest.raises(ShardError, match="layer 0 expert 3: EIO: disk says no"):
        _streamed(source, 0, list(range(8)))
    assert daemon.named("cancel") == [("cancel", 0)]


def test_a_stream_with_a_gap_takes_the_whole_table_and_asks_for_the_rest() -> None:
    daemon, source = _pair()
    stream = source.stream(0, list(range(8)))
    seen = [next(stream)]
    source._table.version = 0  # the daemon's next part begins beyond it
    seen += list(stream)
    assert [expert for expert, _ in seen] == list(range(8))
    assert len(daemon.named("resync")) == 1
    assert len(daemon.named("stream")) == 2


def test_resizes_are_followed_at_the_steps_end_and_acknowledged() -> None:
    daemon, source = _pair()
    source.end_step()
    daemon.resizes = [Drop((3,), 2, 3), Added((3,), 4, 3)]
    source.end_step()
    assert [entry[0] for entry in daemon.log] == ["ack", "dropped", "added", "ack"]


def test_each_step_is_an_epoch_that_is_done_when_a_message_leaves() -> None:
    daemon, source = _pair()
    for step in range(1, 4):
        source.begin_step()
        assert (daemon.epoch, daemon.epoch_done) == (step, step)
        source.end_step()


def test_each_request_says_what_was_applied() -> None:
    daemon, source = _pair()
    _streamed(source, 0, [0])
    _streamed(source, 0, [1])
    assert [entry[3] for entry in daemon.named("miss")] == [1, 2]


def test_retirements_are_taken_and_acknowledged_at_the_steps_end_only() -> None:
    daemon, source = _pair()
    _streamed(source, 0, [0, 1])
    daemon.set(0, 1, -1)
    daemon.push()
    assert source._table.slots[0][1] >= 0
    source.end_step()
    assert source._table.slots[0][1] == -1
    assert daemon.named("ack") == [("ack", daemon.version)]
    source.end_step()
    assert len(daemon.named("ack")) == 1


def test_a_step_ends_with_one_touch_of_all_its_picks() -> None:
    daemon, source = _pair()
    for step in range(2):
        _streamed(source, 0, [0, 3])
        _streamed(source, 1, [2])
        source.end_step()
        assert daemon.named("touch")[step] == ("touch", step, [(0, 0), (0, 3), (1, 2)])


def test_an_abandoned_step_reports_nothing() -> None:
    daemon, source = _pair()
    _streamed(source, 0, [0, 3])
    source.request(0, np.array([5]))
    source.begin_step()
    assert daemon.rows_asked == {}
    source.end_step()
    assert daemon.named("touch") == []


def test_a_gap_in_the_versions_asks_for_the_whole_table() -> None:
    daemon, source = _pair()
    daemon.set(1, 1, 0)
    daemon.set(1, 2, 1)
    daemon.pushed.append(Changes(daemon.version - 1, daemon.version, ((1, 2, 1),)))
    source.end_step()
    assert daemon.named("resync")
    assert source._table.slots == daemon.table.tolist()


def test_an_expert_that_cannot_be_read_fails_the_request_and_nothing_else() -> None:
    daemon, source = _pair()
    daemon.bad = {(0, 2)}
    with pytest.raises(ShardError, match="layer 0 expert 2: EIO: disk says no"):
        _streamed(source, 0, [1, 2])
    assert _streamed(source, 0, [1]) == [(1, 1)]
    assert _streamed(source, 1, [2]) == [(2, 18)]


def test_an_answer_without_the_expert_and_without_an_error_is_a_protocol_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    daemon, source = _pair()
    empty = SlotChanges(1, daemon.applied, daemon.applied, (-1,), (), (), 0, 0.0, final=True)
    monkeypatch.setattr(daemon, "miss", lambda *_, **__: empty)
    with pytest.raises(ProtocolError, match="layer 0 expert 1 is still absent"):
        _streamed(source, 0, [1])


@pytest.mark.parametrize("lost", [["miss"], ["miss", "reconnect", "reconnect"], ["miss", "miss"]])
def test_a_lost_daemon_is_waited_for_and_the_request_repeated(lost: list[str]) -> None:
    tended: list[int] = []
    daemon, source = _pair(tend=lambda: tended.append(1))
    _streamed(source, 0, [0])
    daemon.fail_next = list(lost)
    if lost == ["miss", "miss"]:
        daemon.fail_next = ["miss"]
        original = daemon.reconnect

        def reconnect(*, timeout_ms: int) -> None:
            original(timeout_ms=timeout_ms)
            daemon.fail_next = ["miss"] if daemon.generation == 2 else []

        daemon.reconnect = reconnect  # type: ignore[method-assign]
    assert _streamed(source, 0, [0, 1]) == [(0, 0), (1, 1)]
    assert tended
    assert source.n_daemons_lost == lost.count("miss")


def test_a_daemon_that_stays_away_is_named_after_the_wait() -> None:
    daemon, source = _pair(daemon_wait_s=0.05)
    daemon.fail_next = ["miss"] + ["reconnect"] * 1000
    with pytest.raises(DaemonLost, match=r"waited 0\.05 s"):
        _streamed(source, 0, [1])
    assert source._table.slots == [[-1] * N_EXPERTS] * N_LAYERS


def test_rows_come_in_order_through_parts_that_the_ring_can_hold() -> None:
    daemon, source = _pair()
    rows = np.array([9, 1, 9, 4, 2, 250])
    handle = source.request(1, rows)
    got = source.take(handle)
    assert got.dtype == torch.uint8
    assert got[:, 0].tolist() == rows.tolist()
    assert [len(entry[2]) for entry in daemon.named("rows")] == [4, 2]


def test_a_tokens_rows_of_all_tables_are_one_message() -> None:
    daemon, source = _pair()
    wanted = [(0, np.array([5, 6])), (1, np.array([9]))]
    first, second = source.request_all(wanted)
    assert source.take(second)[:, 0].tolist() == [9]
    assert source.take(first)[:, 0].tolist() == [5, 6]
    assert daemon.named("rows") == [("rows", 0, [5, 6], (1, [9]))]
    daemon.fail_next = ["take"]
    handles = source.request_all(wanted)
    assert [source.take(handle)[:, 0].tolist() for handle in handles] == [[5, 6], [9]]
    source.request_all([(0, np.array([1, 2, 3])), (1, np.array([4, 5]))])
    assert [entry[1:] for entry in daemon.named("rows")[-2:]] == [(0, [1, 2, 3]), (1, [4, 5])]
    source.begin_step()
    assert daemon.rows_asked == {}


def test_rows_that_repeat_are_read_once() -> None:
    daemon, source = _pair()
    rows = np.array([7, 3] * 40)
    assert source.take(source.request(0, rows))[:, 5].tolist() == rows.tolist()
    assert [entry[2] for entry in daemon.named("rows")] == [[3, 7]]


@pytest.mark.parametrize("lost", ["rows", "take"])
def test_rows_are_asked_for_again_when_the_daemon_was_lost(lost: str) -> None:
    daemon, source = _pair()
    daemon.fail_next = [lost]
    first, second = source.request(0, np.array([1, 2])), source.request(1, np.array([3]))
    assert source.take(first)[:, 0].tolist() == [1, 2]
    assert source.take(second)[:, 0].tolist() == [3]
    assert daemon.named("reconnect") or lost == "rows"


def test_a_miss_that_loses_the_daemon_asks_for_outstanding_rows_again() -> None:
    daemon, source = _pair()
    handle = source.request(0, np.array([1, 2]))
    daemon.fail_next = ["miss"]
    _streamed(source, 0, [1])
    assert source.take(handle)[:, 0].tolist() == [1, 2]


def test_a_cancelled_request_stops_before_the_next_layer_or_window() -> None:
    state = SimpleNamespace(cancelled=False)
    daemon, source = _pair(cancelled=lambda: state.cancelled)
    stream = source.stream(0, list(range(6)))
    assert next(stream)[0] == 0
    state.cancelled = True
    with pytest.raises(RequestCancelled):
        list(stream)
    assert len(daemon.named("stream")) == len(daemon.named("cancel")) == 1
    with pytest.raises(RequestCancelled):
        _streamed(source, 0, [0])
    assert daemon.named("miss") == []


def test_what_a_cancelled_stream_brought_is_known_before_anything_is_read() -> None:
    state = SimpleNamespace(cancelled=False)
    daemon, source = _pair(cancelled=lambda: state.cancelled)
    stream = source.stream(0, list(range(6)))
    assert next(stream)[0] == 0
    slot = int(daemon.table[0, 0])
    daemon.while_cancelling = lambda: daemon.set(0, 7, slot)  # read ahead, over what was consumed
    state.cancelled = True
    with pytest.raises(RequestCancelled):
        list(stream)
    assert [list(row) for row in source._table.slots] == daemon.table.tolist()
    assert daemon.applied == daemon.version


def test_what_a_window_brought_that_an_interrupt_left_open_is_known_at_the_next_step() -> None:
    daemon, source = _pair()
    _streamed(source, 0, [0, 1])
    before = daemon.applied
    daemon.set(1, 5, int(daemon.table[0, 1]))
    changes = daemon.changes_from(before)
    daemon.left_open = SlotChanges(
        *(1, before, daemon.version, (-1,), changes), errors=(), n_bytes=0, read_ms=0.0, final=True
    )
    source.begin_step()
    assert [list(row) for row in source._table.slots] == daemon.table.tolist()


def test_a_request_cancelled_while_its_window_is_open_is_cancelled_and_no_error() -> None:
    state = SimpleNamespace(cancelled=False)
    daemon, source = _pair(cancelled=lambda: state.cancelled)
    daemon.while_waiting = lambda: setattr(state, "cancelled", True)
    with pytest.raises(RequestCancelled):
        list(source.stream(0, [0, 1]))
    state.cancelled = False
    daemon.while_waiting = lambda: None
    assert [expert for expert, _ in source.stream(0, [0, 1])] == [0, 1]


def test_waiting_for_a_lost_daemon_can_be_cancelled() -> None:
    state = SimpleNamespace(cancelled=False)

    def tend() -> None:
        state.cancelled = True

    daemon, source = _pair(cancelled=lambda: state.cancelled, tend=tend)
    daemon.fail_next = ["miss"] + ["reconnect"] * 1000
    with pytest.raises(RequestCancelled):
        _streamed(source, 0, [1])


def test_changes_are_acknowledged_while_idle() -> None:
    daemon, source = _pair()
    _streamed(source, 0, [0, 1])
    daemon.set(0, 1, -1)
    daemon.push()
    with source.idle():
        for _ in range(100):
            if daemon.named("ack"):
                break
            time.sleep(0.01)
    assert daemon.named("ack") == [("ack", daemon.version)]
