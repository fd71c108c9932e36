"""Copies into the device cache: when they begin, when they count, what drops them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from compute.experts.device_cache import Promotion
from compute.experts.device_experts import DeviceExperts
from tests.support.arena_daemon import ArenaDaemon
from tests.support.decode_rig import Rig, close_rigs, make_rig

LAYER = 2


@pytest.fixture(autouse=True)
def _rigs_are_closed() -> Iterator[None]:
    yield
    close_rigs()


@pytest.fixture
def made() -> Rig:
    """An arena with room for few, filled with the experts of the first layers."""
    return make_rig(n_slots=110, n_device=16)


def entry(made: Rig, expert: int) -> int:
    return int(made.experts.places.table[LAYER, expert])


def boundary(experts: DeviceExperts, *, is_busy: bool = True) -> None:
    """What has ended enters the table, if the device is busy; what is chosen begins."""
    experts.settle(is_busy=is_busy)
    if is_busy:
        experts.begin_copies()


def picked(experts: DeviceExperts, daemon: ArenaDaemon, *own: int) -> None:
    """A token whose layers all pick the same experts; it is told."""
    n_layers = daemon.table.shape[0]
    experts.end_token(np.array([own] * n_layers), 0, 0)
    experts.report()


def test_a_promotion_begins_at_a_boundary_and_counts_at_a_later_one(made: Rig) -> None:
    experts, daemon = made.experts, made.daemon
    boundary(experts)
    arena_entry = 16 + int(daemon.table[LAYER, 3])
    assert entry(made, 3) == arena_entry
    picked(experts, daemon, 3)
    assert entry(made, 3) == arena_entry
    assert not experts._copies._under_way
    boundary(experts)
    assert entry(made, 3) == arena_entry  # it is being copied
    assert experts._copies._under_way
    boundary(experts)
    assert 0 <= entry(made, 3) < 16
    assert made.experts.tiers()[LAYER * 32 + 3] == 2


def test_a_key_that_is_retired_before_its_copy_begins_is_not_copied(made: Rig) -> None:
    experts, daemon = made.experts, made.daemon
    picked(experts, daemon, 3)
    daemon.drop(LAYER, 3)
    experts.take_changes()
    for _ in range(2):  # the copies of the others begin, and have ended
        boundary(experts)
    assert entry(made, 3) == -1
    assert not experts.cache._moving
    assert len(experts.cache._free) + len(experts.cache.resident) == 16


def test_before_an_idle_device_only_what_the_arena_changed_enters(made: Rig) -> None:
    experts, daemon = made.experts, made.daemon
    boundary(experts)
    picked(experts, daemon, 3)
    experts.settle(is_busy=False)
    assert not experts._copies._under_way  # a copy can wait
    boundary(experts)
    daemon.drop(LAYER, 5)
    experts.take_arrived()
    experts.settle(is_busy=False)
    assert entry(made, 5) == -1
    assert entry(made, 3) >= 16  # and so can what it brought: the arena has it still
    boundary(experts)
    assert 0 <= entry(made, 3) < 16


def test_what_was_copied_enters_at_once_where_the_arena_gives_up_its_slot(made: Rig) -> None:
    experts, daemon = made.experts, made.daemon
    boundary(experts)
    picked(experts, daemon, 3)
    for is_busy in (True, False):  # begun, then ended
        boundary(experts, is_busy=is_busy)
    assert entry(made, 3) >= 16
    daemon.drop(LAYER, 3)
    experts.take_arrived()
    experts.settle(is_busy=False)
    assert 0 <= entry(made, 3) < 16


def test_the_daemon_is_told_now_and_then_what_the_device_has(made: Rig) -> None:
    experts, daemon = made.experts, made.daemon
    boundary(experts)
    assert not daemon.arena.tier.any()
    for _ in range(64):
        picked(experts, daemon, 3, 4)
        boundary(experts)
    assert daemon.arena.tier[LAYER, 3]
    wanted = experts.cache.tier_bytes().reshape(daemon.arena.tier.shape)
    assert ((daemon.arena.tier > 0) == (wanted > 0)).all()


def test_a_token_is_reported_part_by_part(made: Rig) -> None:
    experts, daemon = made.experts, made.daemon
    boundary(experts)
    experts.report()
    daemon.drop(LAYER, 5)
    experts._take_new()
    daemon.events.clear()
    experts.end_token(np.array([[3]] * daemon.table.shape[0]), 0, 0)
    assert experts.report_part()
    assert daemon.events == ["touch"]
    assert not experts._copies._chosen
    assert experts.report_part()
    assert daemon.events == ["touch"]
    assert experts._copies._chosen
    assert experts.report_part()
    assert daemon.events == ["touch", "ack"]
    assert not experts.report_part()


class _Unfinished:
    """The event of a copy that ends when it is waited for."""

    waited = False

    def query(self) -> bool:
        return self.waited

    def synchronize(self) -> None:
        self.waited = True


def test_no_slot_is_given_up_that_a_copy_still_reads(made: Rig) -> None:
    experts, daemon = made.experts, made.daemon
    boundary(experts)
    picked(experts, daemon, 3)
    boundary(experts)
    copies = experts._copies
    events = [_Unfinished() for _ in copies._under_way]
    copies._under_way = [
        replace(copy, done=event)  # type: ignore[arg-type]
        for copy, event in zip(copies._under_way, events, strict=True)
    ]
    keys = [copy.promotion.key for copy in copies._under_way]
    gone = keys.index(LAYER * made.experts.places.n_experts + 3)
    daemon.drop(LAYER, 3)
    (changes,) = daemon.changes()
    experts._apply(changes.from_version, changes.to_version, changes.changes)
    experts.acknowledge()
    assert [event.waited for event in events] == [place == gone for place in range(len(events))]
    assert len(copies._under_way) == len(events) - 1
    assert daemon.applied == daemon.version


def test_a_copy_that_has_ended_counts_though_its_source_is_given_to_another_key(made: Rig) -> None:
    experts, daemon = made.experts, made.daemon
    picked(experts, daemon, 3)
    boundary(experts)
    sources = [copy.source for copy in experts._copies._under_way]
    assert sources
    assert experts.busy_slots() == []  # ended, so entered: the window may take their slots
    daemon.drop(LAYER, 3)
    experts.take_changes()
    assert 0 <= entry(made, 3) < 16


def test_a_request_names_the_sources_of_unfinished_copies_ascending(
    made: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts, daemon = made.experts, made.daemon
    slots = [int(daemon.table[layer, 3]) for layer in range(3)]
    for layer in range(3):  # the first copy's source lies above the ones after it
        experts._table.slots[layer][3] = slots[2 - layer]
    monkeypatch.setattr("compute.experts.device_copies._has_ended", lambda _copy: False)
    picked(experts, daemon, 3)
    boundary(experts)
    assert [copy.source for copy in experts._copies._under_way][:3] == slots[::-1]
    absent = experts.places.table.shape[0] - 1  # of the layers that the arena begins without
    experts.fetch(absent, [int(np.flatnonzero(daemon.table[absent] < 0)[0])])
    ((_, _, busy, _),) = daemon.asked
    assert busy == tuple(sorted(copy.source for copy in experts._copies._under_way))


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize(("n_bytes", "n"), [(0, 1), (3, 3), (100, 2)])
def test_copies_are_bounded_by_number_and_by_bytes(n_bytes: int, n: int, *, is_full: bool) -> None:
    """Four times as many where nobody has to leave for them."""
    experts, daemon = with_bounds(2 if n_bytes == 100 else 8, n_bytes)
    if is_full:
        cache = experts.cache
        for promotion in cache.begin(np.arange(6, 70), 64):
            cache.finish(promotion)
    picked(experts, daemon, *range(6))
    assert len(experts._copies._chosen) == (n if is_full else 4 * n)
    picked(experts, daemon, *range(6))
    assert len(experts._copies._chosen) == (n if is_full else 4 * n)


def test_an_eighth_of_the_arena_at_most_is_under_way_to_an_empty_cache() -> None:
    experts, daemon = with_bounds(16, 100)
    picked(experts, daemon, *range(6))
    assert len(experts._copies._chosen) == 256 // 8


def test_the_last_free_slots_cost_nobody_its_place() -> None:
    experts, daemon = with_bounds(1, 100)
    cache = experts.cache
    for promotion in cache.begin(np.arange(6, 66), 60):
        cache.finish(promotion)
    picked(experts, daemon, *range(6))
    assert [promotion.victim for promotion in experts._copies._chosen] == [-1] * 4


def with_bounds(most: int, n_bytes: int) -> tuple[DeviceExperts, ArenaDaemon]:
    """Experts with 64 empty slots and so many copies at a time, over an arena of all 256 keys."""
    made = make_rig(n_device=64)
    places = made.experts.places
    experts = DeviceExperts(
        made.experts.client,
        made.experts._shapes,
        places,
        most_promoted=most,
        most_promoted_bytes=n_bytes * places.slot_bytes + 1,
    )
    return experts, made.daemon


def test_copies_begin_beside_a_request_that_names_their_sources(
    made: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts, daemon = made.experts, made.daemon
    experts.settle()
    picked(experts, daemon, 3)
    experts.settle()
    assert not experts._copies._under_way  # the way to the device is the computing layers'
    monkeypatch.setattr("compute.experts.device_copies._has_ended", lambda _copy: False)
    absent = experts.places.table.shape[0] - 1
    experts.fetch(absent, [int(np.flatnonzero(daemon.table[absent] < 0)[0])])
    ((_, _, busy, _),) = daemon.asked
    assert len(busy) == len(experts._copies._under_way) > 0


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_small_arena_is_left_room_by_copies(
    has_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the slots are the daemon's: what is under way ends first, what is chosen waits."""
    made = make_rig(n_slots=14, n_device=16)
    experts, daemon = made.experts, made.daemon
    boundary(experts)
    experts.end_token(np.array([[0, 1, 2, 3, 4, 5]] * daemon.table.shape[0]), 0, 0)
    experts.report()
    copies = experts._copies
    assert 2 * (6 + len(copies._chosen)) > 14
    monkeypatch.setattr("compute.experts.device_copies._has_ended", lambda _copy: False)
    if has_begun:
        experts.begin_copies()
    assert bool(copies._under_way) == has_begun
    experts.fetch(LAYER, [int(expert) for expert in np.flatnonzero(daemon.table[LAYER] < 0)[:6]])
    ((_, _, busy, _),) = daemon.asked
    assert busy == ()
    assert not copies._under_way
    assert bool(copies._chosen) != has_begun


def test_copies_end_before_a_chunk_wants_the_arena(
    made: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts, daemon = made.experts, made.daemon
    boundary(experts)
    picked(experts, daemon, 3)
    monkeypatch.setattr("compute.experts.device_copies._has_ended", lambda _copy: False)
    experts.begin_copies()
    assert experts._copies._under_way
    others = [expert for expert in range(6) if expert != 3]
    assert [expert for expert, _ in experts.stream(LAYER, others)] == others
    assert not experts._copies._under_way


def test_without_a_miss_copies_begin_behind_the_tokens_last_layers() -> None:
    made = make_rig(mode="segment", n_device=64)
    experts = made.experts
    made.prefill([3, 911, 17])
    made.runner.step(7)
    experts.report()
    copies = experts._copies
    assert copies._chosen
    n_missed, n_promoted = experts.io.misses, experts.cache.n_promoted
    made.runner.sequence.position -= 1  # the same picks once more
    made.runner.step(7)
    assert (experts.io.misses, copies._chosen) == (n_missed, [])
    experts.settle()
    assert experts.cache.n_promoted > n_promoted


def test_no_copy_begins_from_the_arena_of_a_lost_daemon(made: Rig) -> None:
    experts, daemon = made.experts, made.daemon
    experts.settle()
    picked(experts, daemon, 3)
    daemon.lost = "does not answer"
    experts.begin_copies()
    assert not experts._copies._under_way
    daemon.lost = ""
    experts.begin_copies()
    assert experts._copies._under_way


def test_a_copy_is_dropped_where_its_key_moved_before_it_ended(
    made: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts, daemon = made.experts, made.daemon
    picked(experts, daemon, 3)
    boundary(experts)
    monkeypatch.setattr("compute.experts.device_copies._has_ended", lambda _copy: False)
    assert int(daemon.table[LAYER, 3]) in experts.busy_slots()
    experts._table.slots[LAYER][3] = -1
    monkeypatch.undo()
    boundary(experts)
    assert LAYER * 32 + 3 not in experts.cache.resident
    assert not experts.cache._moving


def test_a_victims_entry_leaves_the_table_before_its_slot_is_written(made: Rig) -> None:
    experts, daemon = made.experts, made.daemon
    for _ in range(3):
        picked(experts, daemon, 0, 1, 5, 6)
        boundary(experts)
    assert not experts.cache._free
    begun: list[tuple[Promotion, int]] = []
    begin = experts._copies._begin

    def noted(promotion: Promotion) -> None:
        if promotion.victim >= 0:
            layer, expert = divmod(promotion.victim, 32)
            begun.append((promotion, int(experts.places.table[layer, expert])))
        begin(promotion)

    experts._copies._begin = noted  # type: ignore[method-assign]
    for _ in range(12):
        picked(experts, daemon, 2, 4)
        boundary(experts)
    assert begun
    assert all(not 0 <= found < 16 for _, found in begun)


def test_a_lost_daemon_leaves_no_promotion_behind(made: Rig) -> None:
    experts, daemon = made.experts, made.daemon
    picked(experts, daemon, 3)
    assert experts._copies._chosen
    experts._copies.abandon()
    assert not experts._copies._chosen
    assert not experts.cache._moving
    boundary(experts)
    assert len(experts.cache._free) == 16
