"""Facts about readers: leases, quota, waiting, going away."""

from __future__ import annotations

import pytest

from expert_daemon.engine_desk import key_fault
from expert_daemon.outcome import RequestRefused
from protocol.wire.codec import encode
from protocol.wire.limits import MAX_FRAME_BYTES, MOST_KEYS_NAMED
from protocol.wire.messages import Leased
from tests.support.caches import Rig

READER = 7


def fetched(rig):
    """The fetch answers due now."""
    return rig.cache.drain().fetches


def test_a_ready_key_is_leased_at_once_with_its_generation():
    rig = Rig()
    slots = rig.get(0, [1, 2]).slots
    rig.cache.fetch(READER, 1, [(0, 2), (0, 1)])
    (answer,) = fetched(rig)
    assert [(lease.expert, lease.slot) for lease in answer.leases] == [(2, slots[1]), (1, slots[0])]
    assert answer.leases[0].generation == rig.memory.headers[slots[1]]["generation"]
    assert (answer.client, answer.request, answer.errors, answer.busy) == (READER, 1, (), False)


def test_an_absent_key_is_read_into_a_free_slot_and_leased():
    rig = Rig()
    rig.cache.fetch(READER, 1, [(0, 1)])
    due = rig.cache.drain()
    assert due.fetches == []
    (load,) = due.loads
    rig.cache.finish(load)
    (answer,) = fetched(rig)
    assert answer.leases[0].slot == load.slot
    rig.cache.check()


def test_two_readers_share_one_read_and_one_slot():
    rig = Rig()
    rig.cache.fetch(1, 1, [(0, 1)])
    rig.cache.fetch(2, 1, [(0, 1)])
    (load,) = rig.cache.drain().loads
    rig.cache.finish(load)
    one, two = fetched(rig)
    assert (one.client, two.client) == (1, 2)
    lease = (load.slot, load.generation)
    assert rig.cache.release(1, [lease]) == 1
    assert rig.cache.release(1, [lease]) == 0
    rig.cache.check()
    assert rig.cache.release(2, [lease]) == 1


def test_without_a_free_slot_a_reader_waits_for_a_retired_one():
    rig = Rig(2)
    rig.get(0, [0])
    rig.get(0, [1])
    rig.cache.fetch(READER, 1, [(1, 5)])
    assert rig.cache.drain().loads == []
    assert rig.states() == {"READY": 1, "RETIRING": 1}
    rig.ack()
    (load,) = rig.cache.drain().loads
    rig.cache.finish(load)
    assert fetched(rig)[0].leases[0].slot == load.slot
    assert rig.resident() == {(0, 1), (1, 5)}


def test_without_an_engine_a_reader_never_waits_for_a_slot():
    rig = Rig(2)
    rig.cache.engine_gone()
    for expert in range(6):
        rig.cache.fetch(READER, expert, [(0, expert)])
        (load,) = rig.cache.drain().loads
        rig.cache.finish(load)
        (lease,) = fetched(rig)[0].leases
        rig.cache.release(READER, [(lease.slot, lease.generation)])
        rig.cache.check()


def test_in_a_window_a_reader_gets_free_slots_only():
    rig = Rig(3, free_pool=1)
    rig.get(0, [0, 1])
    rig.ask(0, [2])
    rig.cache.fetch(READER, 1, [(1, 1), (1, 2)])
    (load,) = rig.cache.drain().loads
    assert (load.layer, load.expert) == (1, 1)
    assert (0, 1) in rig.resident()


def test_leases_beyond_the_quota_are_busy_and_change_nothing():
    rig = Rig(lease_quota=2)
    rig.cache.fetch(1, 1, [(0, 0)])
    rig.cache.fetch(3, 1, [(0, 1)])
    rig.cache.drain()
    rig.cache.fetch(2, 1, [(0, 2)])
    due = rig.cache.drain()
    assert due.loads == []
    assert due.fetches[0].busy
    rig.cache.check()


@pytest.mark.parametrize("is_read", [True, False])
def test_a_reader_that_keeps_all_it_may_leaves_another_as_much(is_read):
    rig = Rig(16, lease_quota=6)
    keys = [(0, expert) for expert in range(3)]
    rig.cache.fetch(1, 1, keys)
    if is_read:
        for load in rig.cache.drain().loads:
            rig.cache.finish(load)
    rig.cache.drain()
    rig.cache.fetch(1, 2, [(0, 5)])
    assert [answer.busy for answer in fetched(rig)] == [True]
    rig.cache.fetch(2, 1, [(1, expert) for expert in range(3)])
    for load in rig.cache.drain().loads:
        rig.cache.finish(load)
    assert [len(a.leases) for a in fetched(rig) if a.client == 2] == [3]
    rig.cache.check()
    rig.cache.client_gone(1)
    rig.cache.fetch(3, 1, keys)
    assert not any(answer.busy for answer in fetched(rig))


def test_a_fetch_larger_than_the_quota_fails_with_both_figures():
    rig = Rig(lease_quota=4)
    rig.cache.fetch(1, 1, [(0, 0), (0, 1), (0, 2)])
    (answer,) = fetched(rig)
    assert [fault.code for fault in answer.errors] == ["NO_SLOT"] * 3
    assert "3 keys" in answer.errors[0].text
    assert "quota is 2" in answer.errors[0].text


def test_a_fetch_too_large_is_answered_within_a_frame_or_refused():
    n_layers, n_experts = 9, MOST_KEYS_NAMED // 8
    rig = Rig(n_layers=n_layers, n_experts=n_experts, lease_quota=4)
    keys = [(layer, expert) for layer in range(n_layers) for expert in range(n_experts)]
    rig.cache.fetch(1, 1, keys[:MOST_KEYS_NAMED])
    (answer,) = fetched(rig)
    assert len(answer.errors) == MOST_KEYS_NAMED
    errors = tuple(map(key_fault, answer.errors))
    assert len(encode(Leased(1, (), errors))) < MAX_FRAME_BYTES // 2
    with pytest.raises(RequestRefused, match=f"{len(keys)} keys.*quota is 2") as refused:
        rig.cache.fetch(1, 2, keys)
    assert refused.value.reason == "limit"
    assert fetched(rig) == []
    rig.cache.check()


def test_a_failed_read_fails_its_key_alone_and_gives_the_quota_back():
    rig = Rig(lease_quota=4)
    rig.cache.fetch(1, 1, [(0, 0), (0, 1)])
    first, second = rig.cache.drain().loads
    rig.cache.fail(first, "EIO", "injected")
    rig.cache.finish(second)
    (answer,) = fetched(rig)
    assert [lease.expert for lease in answer.leases] == [1]
    assert [(fault.expert, fault.code) for fault in answer.errors] == [(0, "EIO")]
    rig.cache.fetch(1, 2, [(0, 3)])
    assert len(rig.cache.drain().loads) == 1


def test_a_deadline_answers_with_what_is_there():
    rig = Rig(2, lease_quota=6)
    rig.get(0, [0])
    rig.cache.fetch(READER, 1, [(0, 0), (0, 1), (0, 2)])
    (load,) = rig.cache.drain().loads
    rig.cache.end_fetch(READER, 1)
    (answer,) = fetched(rig)
    assert [lease.expert for lease in answer.leases] == [0]
    assert [(fault.expert, fault.code) for fault in answer.errors] == [
        (1, "TIMEOUT"),
        (2, "NO_SLOT"),
    ]
    rig.cache.finish(load)
    assert fetched(rig) == []
    assert (0, 1) in rig.resident()
    rig.cache.check()


def test_a_deadline_of_an_answered_fetch_does_nothing():
    rig = Rig()
    rig.cache.end_fetch(READER, 1)
    assert fetched(rig) == []


def test_a_reader_that_is_gone_holds_nothing_and_gets_nothing():
    rig = Rig(2, lease_quota=4)
    rig.get(0, [0])
    rig.cache.fetch(READER, 1, [(0, 0)])
    rig.cache.fetch(READER, 2, [(0, 1)])
    (load,) = rig.cache.drain().loads
    rig.cache.client_gone(READER)
    rig.cache.finish(load)
    assert fetched(rig) == []
    rig.cache.check()
    rig.cache.fetch(8, 1, [(0, 0), (0, 1)])
    assert len(fetched(rig)[0].leases) == 2


def test_a_release_of_another_generation_or_client_is_not_honoured():
    rig = Rig()
    rig.get(0, [0])
    rig.cache.fetch(READER, 1, [(0, 0)])
    (lease,) = fetched(rig)[0].leases
    assert rig.cache.release(READER, [(lease.slot, lease.generation + 1)]) == 0
    assert rig.cache.release(8, [(lease.slot, lease.generation)]) == 0
    assert rig.cache.release(READER, [(lease.slot, lease.generation)]) == 1


def test_a_waiting_fetchs_number_may_not_be_used_again():
    rig = Rig()
    rig.cache.fetch(READER, 1, [(0, 0)])
    with pytest.raises(RequestRefused, match="fetch 1"):
        rig.cache.fetch(READER, 1, [(0, 1)])


def test_a_window_gets_a_key_that_a_reader_waits_for_a_slot_for():
    rig = Rig(1)
    rig.get(0, [0])
    rig.cache.fetch(READER, 1, [(0, 1)])
    assert rig.cache.drain().loads == []
    (load,) = rig.ask(0, [1])
    rig.cache.finish(load)
    due = rig.cache.drain()
    assert due.answers[0].slots == (load.slot,)
    assert due.fetches[0].leases[0].slot == load.slot
    rig.cache.check()
