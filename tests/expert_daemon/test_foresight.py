"""Facts about reads on advice: hints, keys to be warm, and what a smaller arena displaced."""

from __future__ import annotations

import numpy as np

from expert_daemon import foresight
from expert_daemon.outcome import Purpose
from tests.support.caches import Rig


def hint(rig, experts, *, layer=1, step=None):
    rig.cache.hint(rig.step if step is None else step, [(layer, expert) for expert in experts])
    return rig.take()


def test_hints_are_read_into_free_slots_of_the_pool_two_at_a_time():
    rig = Rig(16, free_pool=6)
    rig.get(0, range(10))
    loads = hint(rig, [3, 1, 2])
    assert [(load.expert, load.purpose) for load in loads] == [(3, Purpose.HINT), (1, Purpose.HINT)]
    assert {load.slot for load in loads} == {10, 11}
    rig.cache.finish(loads[0])
    assert [load.expert for load in rig.take()] == [2]


def test_hints_leave_half_of_the_pool_to_readers():
    rig = Rig(16, free_pool=6)
    rig.get(0, range(10))
    assert len(hint(rig, [1, 2])) == 2
    for load in list(rig.due.loads):
        rig.cache.finish(load)
    hint(rig, range(3, 9))
    states = rig.states()
    assert states["FREE"] >= 3
    assert states["RETIRING"] > 0  # the pool is filled again, once the engine says so


def test_nothing_is_begun_on_a_hint_while_a_window_is_open():
    rig = Rig(16, free_pool=6)
    (load,) = rig.ask(0, [1])
    assert hint(rig, [2]) == []
    rig.cache.finish(load)
    assert [one.expert for one in rig.take()] == [2]


def test_hints_are_not_followed_unless_asked_for():
    rig = Rig(16, free_pool=6)
    rig.cache._parts.limits = type(rig.limits)(6, 4)
    assert hint(rig, [2]) == []


def test_a_hint_that_turns_into_demand_is_adopted_and_counts_as_useful():
    rig = Rig(16, free_pool=6)
    (load,) = hint(rig, [2])
    assert rig.ask(1, [2]) == []
    assert [one.purpose for one in rig.due.promoted] == [Purpose.DEMAND]
    rig.cache.finish(load)
    assert rig.answer().slots == (load.slot,)
    assert rig.cache.counters.n_hints_useful == 1
    assert rig.cache._parts.residents.guests == frozenset()


def test_a_reader_that_wants_what_is_being_prefetched_raises_it():
    rig = Rig(16, free_pool=6)
    (load,) = hint(rig, [2])
    rig.cache.fetch(7, 1, [(1, 2)])
    assert [(one.slot, one.purpose) for one in rig.cache.drain().promoted] == [
        (load.slot, Purpose.FETCH)
    ]


def test_what_was_prefetched_goes_first_and_counts_as_wasted_or_useful():
    rig = Rig(8, free_pool=2)
    rig.get(0, range(5))
    for load in hint(rig, [2]):
        rig.cache.finish(load)
    rig.ack()
    assert (1, 2) in rig.resident()
    rig.get(0, [9])
    rig.ack()
    rig.get(0, [10])
    assert (1, 2) not in rig.resident()
    assert (rig.cache.counters.n_hints_wasted, rig.cache.counters.n_hints_useful) == (1, 0)
    rig = Rig(8, free_pool=2)
    for load in hint(rig, [2]):
        rig.cache.finish(load)
    rig.get(1, [2])
    assert (rig.cache.counters.n_hints_wasted, rig.cache.counters.n_hints_useful) == (0, 1)


def test_reads_on_a_hint_whose_layer_has_passed_are_given_up_and_never_publish():
    rig = Rig(16, free_pool=6)
    loads = hint(rig, [2, 3, 4], layer=0)
    rig.ask(1, [7], step=rig.step)
    assert rig.due.unwanted == loads
    for load in loads:
        assert rig.cache.finish(load) is False
    rig.cache.check()
    assert rig.cache.counters.n_hints_stale == 2
    rig.cache.cancel(rig.request)
    assert all(load.purpose is not Purpose.HINT for load in rig.take())


def test_hints_for_a_later_layer_or_step_stay():
    rig = Rig(16, free_pool=6)
    loads = hint(rig, [2, 3], layer=1)
    rig.ask(0, [7], step=rig.step)
    assert rig.due.unwanted == []
    assert len(loads) == 2


def test_a_steps_touch_ends_what_was_foreseen_for_it():
    rig = Rig(16, free_pool=6)
    loads = hint(rig, [2])
    rig.cache.touch(rig.step, np.array([[0, 1]], np.uint16))
    rig.take()
    assert rig.due.unwanted == loads


def test_hints_of_little_use_end_themselves_until_another_engine_comes(monkeypatch):
    monkeypatch.setattr(foresight, "TRIAL", 6)
    rig = Rig(16, free_pool=8)
    for number in range(6):
        loads = hint(rig, [number], layer=1)
        if not rig.cache.hints_ended:
            assert len(loads) == 1
        rig.step += 1
        rig.get(0, [number], step=rig.step)
        for load in loads:
            rig.cache.fail(load, "CANCELLED", "given up")
    hint(rig, [9])
    assert rig.cache.hints_ended
    assert hint(rig, [10]) == []
    rig.cache.engine_attached()
    assert not rig.cache.hints_ended


def test_hints_of_use_go_on(monkeypatch):
    monkeypatch.setattr(foresight, "TRIAL", 4)
    rig = Rig(16, free_pool=8)
    for number in range(12):
        for load in hint(rig, [number], layer=1):
            rig.cache.finish(load)
        rig.ack()
        rig.get(1, [number])
        rig.ack()
    assert not rig.cache.hints_ended
    assert rig.cache.counters.n_hints_useful == 12


def warm(rig, keys):
    rig.cache.warm(keys)
    return rig.take()


def finish_all(rig):
    n = 0
    while rig.due.loads:
        loads, rig.due.loads = rig.due.loads, []
        for load in loads:
            rig.cache.finish(load)
            n += 1
        rig.ack()
        rig.take()
    return n


def test_warm_keys_come_in_the_order_given_and_leave_the_pool_free():
    rig = Rig(16, free_pool=4)
    loads = warm(rig, [(0, expert) for expert in range(16)])
    assert [load.expert for load in loads] == list(range(8))
    assert all(load.purpose is Purpose.WARM for load in loads)
    assert finish_all(rig) == 12
    assert rig.states() == {"READY": 12, "FREE": 4}
    assert rig.cache.n_warm_left == 0
    assert rig.cache.counters.n_warm == 12


def test_warm_reads_begin_outside_of_windows_only_and_go_on_after_them():
    rig = Rig(16, free_pool=4)
    (load,) = rig.ask(1, [1])
    assert warm(rig, [(0, 3)]) == []
    rig.cache.finish(load)
    assert [one.expert for one in rig.take()] == [3]


def test_warm_keys_that_are_there_or_worth_less_are_passed_over():
    rig = Rig(8, free_pool=2)
    for _ in range(3):
        rig.get(0, range(6))
        rig.ack()
    assert warm(rig, [(0, 1), (1, 3)]) == []
    assert rig.cache.counters.n_warm_passed == 2
    assert rig.cache.n_warm_left == 0
    assert {(0, expert) for expert in range(6)} == rig.resident()


def test_warm_keys_worth_more_take_the_place_of_the_lowest_once_that_is_acknowledged():
    rig = Rig(10, free_pool=2)
    rig.get(0, range(4))
    for _ in range(3):
        rig.get(1, range(4))
    rig.ack()
    rig.cache.resize(6, free_pool=2, lease_quota=4)
    displaced = rig.cache.take_displaced()
    assert displaced == [(1, 3), (1, 2)]
    rig.ack()
    assert {layer for layer, _ in rig.resident()} == {0, 1}
    assert warm(rig, displaced) == []
    assert rig.states()["RETIRING"] >= 1
    rig.ack()
    rig.take()
    finish_all(rig)
    assert rig.resident() == {(1, expert) for expert in range(4)}
    assert rig.states()["FREE"] >= 2
    rig.cache.check()


def count_looks(rig, monkeypatch):
    """How often the lowest residents were looked up, and how many keys were looked at."""
    foresight_of, counts = rig.cache._serving.foresight, {"lowest": 0, "keys": 0}
    lowest, is_absent = rig.cache._parts.placement.lowest, foresight_of._is_absent

    def counted_lowest(*args):
        counts["lowest"] += 1
        return lowest(*args)

    def counted_keys(key):
        counts["keys"] += 1
        return is_absent(key)

    monkeypatch.setattr(rig.cache._parts.placement, "lowest", counted_lowest)
    monkeypatch.setattr(foresight_of, "_is_absent", counted_keys)
    return counts


def full_of_worth(n_experts):
    """A cache whose residents are worth more than any other key."""
    rig = Rig(8, free_pool=2, n_experts=n_experts)
    for _ in range(3):
        rig.get(0, range(6))
        rig.ack()
    return rig


def test_one_call_looks_at_so_many_keys_to_be_warm_and_says_that_there_are_more(monkeypatch):
    rig, most = full_of_worth(300), foresight.MOST_WARM_LOOKS
    counts = count_looks(rig, monkeypatch)
    assert warm(rig, [(1, expert) for expert in range(200)]) == []
    assert counts == {"lowest": 1, "keys": most}
    assert (rig.cache.is_cut_short, rig.cache.n_warm_left) == (True, 200 - most)
    n_calls = 1
    while rig.cache.is_cut_short:
        rig.cache.go_on()
        n_calls += 1
    assert n_calls == -(-200 // most)
    assert counts == {"lowest": n_calls, "keys": 200}
    assert rig.cache.counters.n_warm_passed == 200
    assert rig.cache.n_warm_left == 0


def test_keys_to_be_warm_wait_for_the_end_of_a_window_without_being_asked_for():
    rig = full_of_worth(300)
    warm(rig, [(1, expert) for expert in range(200)])
    (load,) = rig.ask(0, [9])
    assert not rig.cache.is_cut_short
    rig.cache.finish(load)
    rig.take()
    assert rig.cache.is_cut_short


def test_a_key_worth_more_is_found_behind_those_worth_less():
    rig = full_of_worth(300)
    for _ in range(20):
        rig.cache.touch(rig.step, np.array([[1, 150]], np.uint16))
        rig.step += 1
    warm(rig, [(1, expert) for expert in range(200)])
    while rig.cache.is_cut_short:
        rig.cache.go_on()
    rig.ack()
    rig.take()
    finish_all(rig)
    assert [key for key in rig.resident() if key[0] == 1] == [(1, 150)]
    assert rig.cache.counters.n_warm == 1


def test_another_warm_takes_the_place_of_the_last():
    rig = Rig(16, free_pool=0)
    loads = warm(rig, [(0, expert) for expert in range(12)])
    assert rig.cache.n_warm_left == 4
    assert warm(rig, [(1, 5)]) == []
    assert rig.cache.n_warm_left == 1
    rig.due.loads = loads
    finish_all(rig)
    assert (1, 5) in rig.resident()
    assert (0, 11) not in rig.resident()


def test_a_warm_read_that_turns_into_demand_is_adopted():
    rig = Rig(16, free_pool=2)
    (load,) = warm(rig, [(0, 3)])
    assert rig.ask(0, [3]) == []
    assert [one.purpose for one in rig.due.promoted] == [Purpose.DEMAND]
    rig.cache.finish(load)
    assert rig.answer().slots == (load.slot,)


def test_a_smaller_arena_loses_its_last_slots_and_says_what_was_in_them():
    rig = Rig(12, free_pool=2, n_slots_max=16)
    for _ in range(3):
        rig.get(1, range(10))
        rig.ack()
    top = {(int(h["layer"]), int(h["expert"])) for h in rig.memory.headers[8:] if h["state"] == 2}
    rig.cache.resize(8, free_pool=1, lease_quota=2)
    assert rig.cache.n_closing > 0
    assert set(rig.cache.take_displaced()) == top
    rig.ack()
    assert rig.cache.n_closing == 0
    assert rig.cache.n_slots == 8
    assert (rig.memory.headers["state"][8:] == 0).all()
    rig.cache.check()
    rig.get(0, range(7))
    assert max(slot for _, _, slot in rig.cache.resident()) < 8


def test_a_leased_slot_goes_when_it_is_released():
    rig = Rig(8, free_pool=0, lease_quota=8)
    rig.cache.fetch(7, 1, [(0, expert) for expert in range(4)])
    for load in rig.cache.drain().loads:
        rig.cache.finish(load)
    (fetched,) = rig.cache.drain().fetches
    rig.cache.resize(2, free_pool=0, lease_quota=1)
    rig.cache.check()
    assert rig.cache.n_closing == 2
    rig.cache.release(7, [(lease.slot, lease.generation) for lease in fetched.leases])
    rig.ack()
    assert rig.cache.n_closing == 0


def test_a_read_under_way_in_a_slot_that_goes_is_waited_for():
    rig = Rig(4)
    loads = rig.ask(0, [0, 1, 2, 3])
    rig.cache.resize(2, free_pool=0, lease_quota=1)
    for load in loads:
        rig.cache.finish(load)
    assert all(slot >= 0 for slot in rig.answer().slots)
    assert rig.cache.n_closing == 2
    rig.ack()
    assert rig.cache.n_closing == 0
    assert len(rig.resident()) == 2


def test_added_slots_are_free():
    rig = Rig(4, n_slots_max=10)
    rig.get(0, range(4))
    rig.cache.resize(9, free_pool=0, lease_quota=1)
    rig.cache.check()
    rig.get(1, range(5))
    assert len(rig.resident()) == 9
