"""Facts about reads that are slow or hopeless: hedged ones, and keys that are not to be read."""

from __future__ import annotations

from protocol.arena.layout import SlotState
from tests.support.caches import Rig


def hedged(rig: Rig):
    """A key that is read into two slots."""
    (first,) = rig.ask(0, [3])
    second = rig.cache.hedge(first)
    assert second is not None
    assert second.slot != first.slot
    rig.cache.check()
    return first, second


def test_the_hedge_publishes_and_the_late_read_never_does():
    rig = Rig()
    first, second = hedged(rig)
    assert rig.cache.finish(second, 7)
    assert rig.answer().slots == (second.slot,)
    assert rig.memory.headers["state"][first.slot] == SlotState.LOADING
    assert not rig.cache.finish(first, 8)
    assert rig.memory.headers["state"][first.slot] == SlotState.FREE
    assert rig.memory.table[0, 3] == second.slot
    rig.cache.check()


def test_the_first_read_publishes_when_it_is_whole_before_its_hedge():
    rig = Rig()
    first, second = hedged(rig)
    assert rig.cache.finish(first, 7)
    assert rig.answer().slots == (first.slot,)
    rig.cache.fail(second, "EIO", "late")
    assert rig.memory.table[0, 3] == first.slot
    assert rig.states() == {"READY": 1, "FREE": 7}
    rig.cache.check()


def test_one_failure_of_the_two_is_no_failure_of_the_key():
    for order in (0, 1):
        rig = Rig()
        pair = hedged(rig)
        rig.cache.fail(pair[order], "EIO", "one of two")
        assert rig.cache.drain().answers == []
        rig.cache.check()
        assert rig.cache.finish(pair[1 - order], 1)
        assert rig.answer().errors == ()
        rig.cache.check()


def test_both_failures_fail_the_key_once():
    rig = Rig()
    first, second = hedged(rig)
    rig.cache.fail(first, "EIO", "one")
    rig.cache.fail(second, "EIO", "two")
    (fault,) = rig.answer().errors
    assert fault.text == "two"
    assert rig.states() == {"FREE": 8}
    rig.cache.check()


def test_a_read_given_up_leaves_its_key_to_the_hedge():
    rig = Rig()
    first, second = hedged(rig)
    rig.cache.disown(first, "TIMEOUT", "given up")
    assert rig.cache.drain().answers == []
    third = rig.cache.hedge(second)
    assert third is not None
    rig.cache.disown(second, "TIMEOUT", "given up")
    rig.cache.disown(third, "TIMEOUT", "given up too")
    assert rig.answer().errors[0].text == "given up too"
    for load in (first, second, third):
        assert not rig.cache.finish(load, 1)
    assert rig.states() == {"FREE": 8}
    rig.cache.check()


def test_a_key_has_two_reads_at_most_and_none_without_a_free_slot():
    rig = Rig(n_slots=2)
    first, second = hedged(rig)
    assert rig.cache.hedge(first) is None
    assert rig.cache.hedge(second) is None
    rig.cache.finish(second, 1)
    rig.answer()
    assert rig.cache.hedge(first) is None  # it can publish no more
    full = Rig(n_slots=1)
    (only,) = full.ask(0, [1])
    assert full.cache.hedge(only) is None


def test_a_hedge_takes_no_busy_slot():
    rig = Rig(n_slots=3)
    (probe,) = rig.ask(0, [1])
    rig.cache.finish(probe)
    rig.answer()
    free = [slot for slot in range(3) if slot != probe.slot]
    (load,) = rig.ask(0, [2], busy=free[:1])
    assert load.slot == free[1]
    assert rig.cache.hedge(load) is None
    rig.cache.check()


def test_a_barred_key_fails_without_a_read_and_costs_nobody_a_slot():
    rig = Rig(n_slots=2)
    rig.get(0, [1, 2])
    rig.cache.bar(0, 3, "QUARANTINED", "rotten")
    answer = rig.get(0, [1, 3])
    assert [(fault.expert, fault.code, fault.text) for fault in answer.errors] == [
        (3, "QUARANTINED", "rotten")
    ]
    assert rig.resident() == {(0, 1), (0, 2)}
    rig.cache.fetch(1, 1, [(0, 3), (0, 2)])
    (fetched,) = rig.cache.drain().fetches
    assert [lease.expert for lease in fetched.leases] == [2]
    assert fetched.errors[0].code == "QUARANTINED"
    rig.cache.check()
    rig.cache.unbar(0, 3)
    assert rig.get(0, [3]).errors == ()
    rig.cache.check()
