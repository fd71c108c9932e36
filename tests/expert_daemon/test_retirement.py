"""When a RETIRING slot is free."""

from __future__ import annotations

from expert_daemon.retirement import RetireQueue


def test_slots_come_free_in_the_order_of_their_versions():
    queue = RetireQueue()
    queue.add(3, 9)
    queue.add(4, 7)
    queue.ack(7, 0, 0)
    assert queue.take_free() == [4]
    queue.ack(9, 0, 0)
    assert queue.take_free() == [3]
    assert len(queue) == 0


def test_a_slot_of_a_version_applied_long_ago_waits_for_the_launches_known_now():
    queue = RetireQueue()
    queue.ack(9, 4, 6)
    queue.add(3, 5)
    assert queue.take_free() == []
    queue.ack(9, 6, 8)
    assert queue.take_free() == [3]


def test_older_figures_change_nothing():
    queue = RetireQueue()
    queue.add(3, 5)
    queue.ack(9, 9, 9)
    queue.ack(2, 1, 1)
    assert queue.applied == 9
    assert queue.take_free() == [3]


def test_another_engine_has_acknowledged_nothing():
    queue = RetireQueue()
    queue.add(3, 5)
    queue.ack(6, 1, 2)
    queue.new_engine()
    assert queue.applied == -1
    assert queue.take_free() == []
    queue.ack(4, 0, 0)
    assert queue.take_free() == []
    queue.ack(5, 0, 0)
    assert queue.take_free() == [3]


def test_all_can_be_taken():
    queue = RetireQueue()
    queue.add(3, 5)
    queue.add(4, 6)
    queue.ack(5, 0, 1)
    assert sorted(queue.take_all()) == [3, 4]
    assert queue.slots() == []
