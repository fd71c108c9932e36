"""Facts about write windows, versions, retirement and restarts."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import replace

import numpy as np
import pytest

from expert_daemon.outcome import Purpose, RequestRefused
from protocol.arena.layout import SlotState
from tests.support.caches import Rig


def test_a_slot_is_loading_with_its_key_when_the_read_is_handed_out():
    rig = Rig()
    (load,) = rig.ask(1, [5])
    header = rig.memory.headers[load.slot]
    assert header["state"] == SlotState.LOADING
    assert (header["layer"], header["expert"]) == (1, 5)
    assert header["generation"] == load.generation
    assert rig.memory.table[1, 5] == -1


def test_a_finished_read_is_ready_in_header_and_table():
    rig = Rig()
    (load,) = rig.ask(1, [5])
    assert rig.cache.finish(load, checksum=99)
    header = rig.memory.headers[load.slot]
    assert (header["state"], header["checksum"]) == (SlotState.READY, 99)
    assert rig.memory.table[1, 5] == load.slot
    answer = rig.answer()
    assert answer.slots == (load.slot,)
    assert answer.table.changes == ((1, 5, load.slot),)
    assert (answer.n_hits, answer.n_loaded, answer.n_adopted) == (0, 1, 0)
    rig.cache.check()


def test_hits_alone_are_answered_at_once_without_reads():
    rig = Rig()
    slots = rig.get(0, [1, 2]).slots
    assert rig.ask(0, [1, 2]) == []
    answer = rig.answer()
    assert answer.slots == slots
    assert answer.n_hits == 2
    assert answer.table.changes == ()


def test_a_request_without_experts_is_answered_at_once():
    rig = Rig()
    assert rig.ask(0, []) == []
    assert rig.answer().slots == ()


def test_the_answer_waits_for_the_last_read():
    rig = Rig()
    first, second = rig.ask(0, [1, 2])
    rig.cache.finish(second)
    assert not rig.cache.drain().answers
    assert rig.cache.window_open
    rig.cache.finish(first)
    assert rig.answer().slots == (first.slot, second.slot)
    assert not rig.cache.window_open


def test_a_requests_own_hits_are_never_its_victims():
    rig = Rig(4)
    rig.get(0, [0, 1, 2, 3])
    answer = rig.get(0, [0, 4, 5, 6])
    assert answer.n_hits == 1
    assert rig.resident() == {(0, 0), (0, 4), (0, 5), (0, 6)}


def test_the_evicted_key_is_in_the_answer_as_absent():
    rig = Rig(2)
    slots = rig.get(0, [0, 1]).slots
    answer = rig.get(0, [2])
    assert answer.slots == (slots[0],)
    assert answer.table.changes == ((0, 0, -1), (0, 2, slots[0]))


def test_busy_slots_are_not_taken():
    rig = Rig(3)
    slots = rig.get(0, [0, 1, 2]).slots
    (load,) = rig.ask(0, [3], busy=[slots[0], slots[1]])
    assert load.slot == slots[2]


def test_leased_slots_are_not_taken_and_not_retired():
    rig = Rig(3, free_pool=1)
    slots = rig.get(0, [0, 1]).slots
    rig.cache.fetch(7, 1, [(0, 0)])
    assert [lease.slot for lease in rig.cache.drain().fetches[0].leases] == [slots[0]]
    rig.get(0, [2])
    rig.get(0, [3])
    rig.get(0, [4])
    assert (0, 0) in rig.resident()
    rig.cache.check()


def test_without_a_slot_to_take_a_key_fails_and_the_others_do_not():
    rig = Rig(3)
    slots = rig.get(0, [0, 1, 2]).slots
    (load,) = rig.ask(0, [2, 3, 4], busy=[slots[0]])
    rig.cache.finish(load)
    answer = rig.answer()
    assert answer.slots == (slots[2], slots[1], -1)
    (fault,) = answer.errors
    assert (fault.layer, fault.expert, fault.code) == (0, 4, "NO_SLOT")
    assert "3 slots" in fault.text
    rig.cache.check()


def test_a_key_waits_for_a_read_of_somebody_else_that_may_yield_a_slot():
    rig = Rig(1, lease_quota=1)
    rig.cache.fetch(7, 1, [(0, 0)])
    (load,) = rig.cache.drain().loads
    assert rig.ask(0, [1]) == []
    assert rig.cache.window_open
    rig.cache.end_fetch(7, 1)
    rig.cache.finish(load)
    (second,) = rig.cache.drain().loads
    assert second.slot == load.slot
    rig.cache.finish(second)
    assert rig.answer().table.changes == ((0, 0, -1), (0, 1, second.slot))


def test_a_read_under_way_for_a_reader_is_adopted_and_promoted():
    rig = Rig()
    rig.cache.fetch(7, 1, [(0, 3)])
    (load,) = rig.cache.drain().loads
    assert load.purpose is Purpose.FETCH
    assert rig.ask(0, [3]) == []
    assert rig.due.promoted == [replace(load, purpose=Purpose.DEMAND)]
    rig.cache.finish(load)
    answer = rig.answer()
    assert (answer.slots, answer.n_adopted, answer.n_loaded) == ((load.slot,), 1, 0)


def test_the_same_request_again_while_open_is_answered_once():
    rig = Rig()
    (load,) = rig.ask(0, [3])
    rig.cache.open_window(1, 1, 0, [3], [], 0, 0)
    assert rig.cache.drain().loads == []
    rig.cache.finish(load)
    assert rig.answer().slots == (load.slot,)


def test_the_same_request_again_after_its_answer_gives_the_same_slots():
    rig = Rig()
    first = rig.get(0, [3, 4])
    rig.cache.open_window(1, 1, 0, [3, 4], [], 0, 0)
    due = rig.cache.drain()
    assert due.loads == []
    assert due.answers[0].slots == first.slots
    assert due.answers[0].table == first.table
    assert not rig.cache.window_open


def test_an_old_request_again_never_names_a_slot_that_has_another_key_now():
    rig = Rig(2)
    rig.get(0, [0])
    rig.get(0, [1, 2])
    rig.cache.open_window(1, 1, 0, [0], [], rig.applied, 0)
    (answer,) = rig.cache.drain().answers
    assert answer.slots == (-1,)
    assert answer.errors[0].code == "NO_SLOT"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"experts": [4]}, "malformed"),  # the number of the open window with other experts
        ({"request": 3}, "limit"),  # a second window
        ({"request": 3, "applied": 1000}, "limit"),
        ({"applied": 1000}, "malformed"),  # a version from the future
    ],
)
def test_a_request_that_may_not_be_is_refused_and_changes_nothing(change, reason):
    rig = Rig()
    rig.get(0, [3])
    rig.ask(0, [5])
    before = rig.memory.headers.copy()
    request = {"request": 2, "step": 2, "layer": 0, "experts": [5], "busy": [], "epoch_done": 0}
    with pytest.raises(RequestRefused) as refused:
        rig.cache.open_window(**(request | {"applied": rig.applied} | change))
    assert refused.value.reason == reason
    assert (before == rig.memory.headers).all()
    rig.cache.check()


def test_a_number_older_than_those_remembered_is_stale():
    rig = Rig()
    for _ in range(30):
        rig.get(0, [3])
    with pytest.raises(RequestRefused, match="wanted a number above 30") as refused:
        rig.cache.open_window(2, 2, 0, [3], [], rig.applied, 0)
    assert refused.value.reason == "stale"


def test_a_request_without_an_engine_is_refused():
    rig = Rig()
    rig.cache.engine_gone()
    with pytest.raises(RequestRefused) as refused:
        rig.ask(0, [1])
    assert refused.value.reason == "hello_first"


def test_cancel_answers_with_every_change_and_the_slot_stays_loading():
    rig = Rig(2)
    slots = rig.get(0, [0, 1]).slots
    (load,) = rig.ask(0, [2])
    rig.cache.cancel(rig.request)
    answer = rig.answer()
    assert answer.table.changes == ((0, 0, -1),)
    assert answer.slots == (-1,)
    assert answer.errors[0].code == "CANCELLED"
    assert rig.memory.headers[load.slot]["state"] == SlotState.LOADING
    assert load.slot == slots[0]
    assert not rig.cache.wanted(load)
    rig.cache.check()


def test_a_cancelled_read_that_ends_well_is_published_as_a_later_change():
    rig = Rig(2)
    rig.get(0, [0, 1])
    (load,) = rig.ask(0, [2])
    rig.cache.cancel(rig.request)
    rig.answer()
    assert rig.cache.finish(load)
    assert rig.cache.changes_since(rig.applied).changes == ((0, 2, load.slot),)
    rig.cache.check()


def test_a_cancelled_read_is_adopted_when_the_key_is_asked_for_again():
    rig = Rig(2)
    (load,) = rig.ask(0, [2])
    rig.cache.cancel(1)
    rig.answer()
    assert rig.ask(0, [2]) == []
    assert rig.cache.wanted(load)
    rig.cache.finish(load)
    assert rig.answer().slots == (load.slot,)


def test_cancel_of_an_answered_request_is_answered_again():
    rig = Rig()
    answer = rig.get(0, [1])
    rig.cache.cancel(1)
    assert rig.cache.drain().answers == [answer]


def test_cancel_of_an_unknown_request_is_answered_without_slots():
    rig = Rig()
    rig.get(0, [1])
    rig.ack()
    rig.cache.cancel(99)
    (answer,) = rig.cache.drain().answers
    assert (answer.request, answer.slots, answer.table.changes) == (99, (), ())


def test_a_failed_read_into_a_free_slot_leaves_it_free():
    rig = Rig(2)
    (load,) = rig.ask(0, [2])
    rig.cache.fail(load, "EIO", "shard-3 bytes 7 to 9")
    answer = rig.answer()
    assert rig.states() == {"FREE": 2}
    (fault,) = answer.errors
    assert (fault.layer, fault.expert, fault.code) == (0, 2, "EIO")
    assert fault.text == "shard-3 bytes 7 to 9"
    assert answer.table.changes == ()


def test_a_failed_read_into_a_ready_slot_retires_it_until_the_answer_is_acknowledged():
    rig = Rig(2)
    rig.get(0, [0, 1])
    (load,) = rig.ask(0, [2])
    rig.cache.fail(load, "EIO", "injected")
    answer = rig.answer()
    assert answer.table.changes == ((0, 0, -1),)
    assert rig.states() == {"READY": 1, "RETIRING": 1}
    rig.cache.ack(answer.table.to_version, 0)
    assert rig.states() == {"READY": 1, "FREE": 1}
    rig.cache.check()


def test_one_failure_harms_no_other_key_of_the_request():
    rig = Rig()
    first, second, third = rig.ask(0, [1, 2, 3])
    rig.cache.fail(second, "TRUNCATED", "short")
    rig.cache.finish(first)
    rig.cache.finish(third)
    answer = rig.answer()
    assert answer.slots == (first.slot, -1, third.slot)
    assert [fault.expert for fault in answer.errors] == [2]
    assert answer.n_loaded == 2


def test_a_disowned_read_fails_its_key_and_never_publishes():
    rig = Rig(2)
    (load,) = rig.ask(0, [2])
    rig.cache.disown(load, "TIMEOUT", "no answer from the drive")
    assert rig.answer().errors[0].code == "TIMEOUT"
    assert rig.states()["LOADING"] == 1
    (again,) = rig.ask(0, [2])
    assert again.slot != load.slot
    rig.cache.finish(again)
    assert not rig.cache.finish(load)
    assert rig.resident() == {(0, 2)}
    assert rig.states() == {"READY": 1, "FREE": 1}
    rig.cache.check()


def test_a_read_returns_only_once():
    rig = Rig()
    (load,) = rig.ask(0, [2])
    rig.cache.finish(load)
    with pytest.raises(AssertionError, match="returned already"):
        rig.cache.finish(load)


def test_the_free_pool_is_refilled_after_the_window_by_retiring_the_lowest():
    rig = Rig(4, free_pool=1, lease_quota=2)
    rig.get(0, [0, 1, 2])
    assert rig.states() == {"FREE": 1, "READY": 3}
    rig.cache.fetch(7, 1, [(1, 0)])
    (load,) = rig.cache.drain().loads
    rig.cache.finish(load)
    rig.get(0, [1, 2])
    assert rig.states() == {"READY": 3, "RETIRING": 1}
    assert rig.resident() == {(0, 1), (0, 2), (1, 0)}
    assert rig.cache.changes_since(rig.applied).changes == ((0, 0, -1),)
    rig.ack()
    assert rig.states() == {"READY": 3, "FREE": 1}
    rig.cache.check()


def test_keys_just_answered_are_not_retired_before_the_next_request():
    rig = Rig(4, free_pool=2)
    rig.get(0, [0, 1, 2, 3])
    assert rig.states() == {"READY": 4}
    rig.get(0, [0])
    assert rig.states() == {"READY": 2, "RETIRING": 2}
    assert (0, 0) in rig.resident()


def test_retiring_ends_only_when_the_version_is_applied_and_older_launches_are_done():
    rig = Rig(2, free_pool=1)
    rig.get(0, [0, 1])
    rig.get(0, [1])
    assert rig.states() == {"READY": 1, "RETIRING": 1}
    cache = rig.cache
    cache.ack(cache.table_version - 1, epoch_done=5, epoch_launched=5)
    assert rig.states()["RETIRING"] == 1
    cache.ack(cache.table_version, epoch_done=5, epoch_launched=8)
    assert rig.states()["RETIRING"] == 1
    cache.ack(cache.table_version, epoch_done=7, epoch_launched=9)
    assert rig.states()["RETIRING"] == 1
    cache.ack(cache.table_version, epoch_done=8, epoch_launched=9)
    assert rig.states() == {"READY": 1, "FREE": 1}


def test_an_acknowledgement_from_the_future_is_refused():
    rig = Rig()
    with pytest.raises(RequestRefused, match="version 1 was applied, the table is at 0"):
        rig.cache.ack(1, 0)


def test_an_engine_that_is_gone_holds_nothing():
    rig = Rig(2, free_pool=1)
    rig.get(0, [0, 1])
    rig.get(0, [1])
    (load,) = rig.ask(0, [2])
    rig.cache.engine_gone()
    assert not rig.cache.window_open
    assert "RETIRING" not in rig.states()
    assert rig.cache.finish(load)
    assert not rig.cache.drain().answers
    rig.cache.check()


def test_a_new_engine_finds_the_experts_and_counts_from_one():
    rig = Rig()
    slots = rig.get(0, [0, 1]).slots
    rig.cache.engine_gone()
    rig.cache.engine_attached()
    rig.request = rig.step = 0
    assert rig.ask(0, [0, 1]) == []
    assert rig.answer().slots == slots


def test_an_answer_not_yet_taken_is_not_given_to_the_next_engine():
    rig = Rig()
    for load in rig.ask(0, [0]):
        rig.cache.finish(load)
    rig.cache.engine_gone()
    rig.cache.engine_attached()
    assert rig.cache.drain().answers == []


def test_resync_closes_the_window_without_an_answer():
    rig = Rig(2)
    rig.get(0, [0, 1])
    (load,) = rig.ask(0, [2])
    rig.cache.resync()
    assert not rig.cache.window_open
    assert not rig.cache.drain().answers
    rig.applied = rig.cache.table_version
    assert rig.ask(0, [2]) == []
    rig.cache.finish(load)
    assert rig.answer().slots == (load.slot,)


def test_assign_evict_assign_of_one_key_ends_in_the_last_state():
    rig = Rig(1)
    rig.get(0, [0])
    rig.get(0, [1])
    rig.get(0, [0])
    table = rig.cache.changes_since(0)
    assert table.changes == ((0, 0, 0), (0, 1, -1))
    assert (table.from_version, table.to_version) == (0, rig.cache.table_version)


def test_a_history_that_is_too_short_answers_with_a_gap():
    rig = Rig(history=3)
    rig.get(0, [0, 1, 2, 3, 4])
    table = rig.cache.changes_since(0)
    assert table.from_version > 0
    assert rig.cache.changes_since(table.from_version) == table


def test_uses_count_once_a_step_however_they_come():
    rig = Rig()
    rig.get(0, [1, 2], step=4)
    picks = np.array([(0, 1), (0, 2), (0, 3), (1, 1)], np.uint16)
    assert rig.cache.touch(4, picks) == 2
    assert rig.cache.touch(4, picks) == 0
    assert rig.cache.touch(3, picks) == 0
    assert rig.cache.touch(5, picks) == 4
    scores = rig.memory.headers["score"]
    assert scores[rig.memory.table[0, 1]] == 2
    assert rig.cache.counters.n_uses == 8


def test_picks_that_the_model_does_not_have_are_refused():
    rig = Rig()
    with pytest.raises(RequestRefused):
        rig.cache.touch(1, np.array([(0, 16)], np.uint16))
    with pytest.raises(RequestRefused):
        rig.cache.touch(1, np.array([(2, 0)], np.uint16))


def test_what_was_used_more_stays_longer():
    rig = Rig(3)
    rig.get(0, [0, 1, 2])
    for step in range(10, 14):
        rig.cache.touch(step, np.array([(0, 0), (0, 2)], np.uint16))
    rig.get(1, [9], step=20)
    assert rig.resident() == {(0, 0), (0, 2), (1, 9)}


# restarts


def test_adopted_ready_slots_keep_their_keys_and_the_others_wait_for_the_engine():
    rig = Rig(5)
    answer = rig.get(0, [0, 1])
    rig.ask(0, [2])
    rig.restart()
    assert rig.states() == {"READY": 2, "RETIRING": 3}
    assert rig.memory.table[0, :3].tolist() == [*answer.slots, -1]
    assert rig.cache.table_version > answer.table.to_version
    rig.cache.engine_attached()
    assert rig.states()["RETIRING"] == 3
    rig.ack()
    assert rig.states() == {"READY": 2, "FREE": 3}
    assert rig.ask(0, [0, 1], step=9) == []
    rig.cache.check()


def test_without_an_engine_an_adopted_arena_is_free_at_once():
    rig = Rig(5)
    rig.get(0, [0, 1])
    rig.ask(0, [2])
    rig.restart(engine_may_live=False)
    assert rig.states() == {"READY": 2, "FREE": 3}


def test_an_engine_that_turns_out_dead_frees_an_adopted_arena():
    rig = Rig(5)
    rig.get(0, [0])
    rig.restart()
    rig.cache.engine_gone()
    assert rig.states() == {"READY": 1, "FREE": 4}


def test_two_ready_slots_of_one_key_leave_the_newer():
    rig = Rig(4)
    a, b = rig.get(0, [0, 1]).slots
    headers = rig.memory.headers
    headers["expert"][a] = 1
    headers["version"][a] = headers["version"][b]
    headers["generation"][b] = 7
    rig.restart()
    assert rig.memory.table[0, 1] == b
    assert rig.states() == {"READY": 1, "RETIRING": 3}


def test_headers_of_no_key_and_no_state_are_not_kept():
    rig = Rig(4)
    rig.get(0, [0, 1, 2, 3])
    headers = rig.memory.headers
    headers["layer"][0] = 9
    headers["expert"][1] = 16
    headers["state"][2] = 77
    headers["score"][3] = np.nan
    rig.memory.table[:] = 3
    rig.memory.sequence[0] = 5
    rig.restart()
    assert rig.states() == {"READY": 1, "RETIRING": 3}
    assert (rig.memory.table >= 0).sum() == 1
    assert int(rig.memory.sequence[0]) % 2 == 0


def test_the_order_of_eviction_outlives_restarts():
    rig = Rig(4)
    rig.get(0, [0, 1, 2, 3])
    rig.cache.touch(50, np.array([(0, 1)], np.uint16))
    for _ in range(2):
        rig.restart(engine_may_live=False)
        rig.cache.touch(60, np.array([(0, 0)], np.uint16))
    rig.cache.engine_attached()
    rig.request, rig.applied = 0, rig.cache.table_version
    rig.get(1, [0, 1])
    assert rig.resident() == {(0, 0), (0, 1), (1, 0), (1, 1)}


# traces


def trace(seed: int, n_steps: int, n_experts: int = 16) -> list[tuple[int, list[int]]]:
    draw = random.Random(seed)
    weights = [1 / (1 + expert) for expert in range(n_experts)]
    steps = []
    for step in range(n_steps):
        picks = set(draw.choices(range(n_experts), weights, k=3))
        steps.append((step % 2, sorted(picks)))
    return steps


@pytest.mark.parametrize("policy", ["lfu-da", "lru"])
def test_misses_fall_as_slots_grow_and_a_second_pass_has_hits(policy):
    steps = trace(0, 400)
    misses = []
    for n_slots in (6, 10, 16, 24, 32):
        rig = Rig(n_slots, policy=policy)
        for layer, experts in steps:
            rig.get(layer, experts)
        first = rig.cache.counters.n_misses
        hits = rig.cache.counters.n_hits
        for layer, experts in steps:
            rig.get(layer, experts)
        assert rig.cache.counters.n_hits > hits
        misses.append(first)
        rig.cache.check()
    assert misses == sorted(misses, reverse=True)
    assert misses[-1] == len({(layer, e) for layer, experts in steps for e in experts})


def test_disjoint_traces_never_hold_more_than_the_slots():
    rig = Rig(6, n_experts=64)
    for first in range(0, 60, 4):
        rig.get(0, range(first, first + 4))
        assert len(rig.resident()) <= 6
        rig.cache.check()
    assert rig.states() == {"READY": 6}


def test_a_thousand_failed_reads_lose_no_slot():
    rig = Rig(8, free_pool=1)
    draw = random.Random(3)
    failed = 0
    while failed < 1000:
        for load in rig.ask(draw.randrange(2), sorted(draw.sample(range(16), 4))):
            if draw.random() < 0.7:
                rig.cache.fail(load, "EIO", "injected")
                failed += 1
            else:
                rig.cache.finish(load)
        rig.answer()
        rig.cache.check()
    rig.ack()
    rig.cache.check()
    states = rig.states()
    assert states.get("FREE", 0) + states.get("READY", 0) == 8


def test_completion_in_any_order_ends_in_the_same_table():
    ends = []
    for seed in range(20):
        draw = random.Random(seed)
        rig = Rig(8)
        for layer, experts in trace(1, 60):
            loads = rig.ask(layer, experts)
            draw.shuffle(loads)
            for load in loads:
                rig.cache.finish(load)
            rig.answer()
        ends.append(rig.resident())
    assert all(end == ends[0] for end in ends)


@pytest.mark.timing
@pytest.mark.parametrize("policy", ["lfu-da", "lru"])
def test_one_miss_costs_the_same_with_few_and_with_many_slots(policy):
    """Misses of full caches, one of each in turn; the medians are compared."""
    n_layers, n_experts = 60, 384
    rigs = {}
    for n_slots in (1_000, 15_000):
        rig = rigs[n_slots] = Rig(
            n_slots, n_layers=n_layers, n_experts=n_experts, free_pool=64, policy=policy
        )
        for layer in range(-(-n_slots // n_experts)):
            rig.get(layer, range(min(n_experts, n_slots - layer * n_experts)))
    draw = np.random.default_rng(0)
    costs: dict[int, list[float]] = {n_slots: [] for n_slots in rigs}
    while len(costs[15_000]) < 500:
        for n_slots, rig in rigs.items():
            rig.cache.touch(
                rig.step + 1, draw.integers(0, [n_layers, n_experts], (60, 2)).astype(np.uint16)
            )
            absent = np.argwhere(rig.memory.table < 0)
            layer, expert = absent[draw.integers(len(absent))].tolist()
            start = time.perf_counter()
            assert rig.get(layer, [expert]).n_loaded == 1
            costs[n_slots].append(time.perf_counter() - start)
    few, many = (statistics.median(costs[n_slots]) for n_slots in rigs)
    assert many < 1.5 * few
