"""Facts about streams: order, bounds, parts, and what they leave in the arena."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert_daemon.outcome import Purpose, RequestRefused
from tests.support.caches import Rig

ALL = list(range(16))


def named(part):
    return [expert for expert, slot in zip(part.experts, part.slots, strict=True) if slot >= 0]


def test_experts_are_read_in_ascending_order_and_no_further_than_the_window():
    rig = Rig(12, free_pool=2)
    loads = rig.stream(0, ALL, window=3)
    assert [load.expert for load in loads] == [0, 1, 2]
    for load in loads:
        rig.cache.finish(load)
    assert rig.parts()[-1].experts == tuple(ALL)
    assert rig.take() == []
    rig.cache.consume(1, 1)
    assert [load.expert for load in rig.take()] == [3, 4]


def test_parts_name_experts_in_order_however_their_reads_end():
    rig = Rig(12)
    first, second, third = rig.stream(0, [2, 5, 7], window=3)
    rig.cache.finish(third)
    rig.cache.finish(second)
    assert rig.parts() == []
    rig.cache.finish(first)
    (part,) = rig.parts()
    assert part.slots == (first.slot, second.slot, third.slot)
    assert part.final
    assert not rig.cache.window_open


def test_each_expert_is_named_once_and_the_changes_of_the_parts_follow_on():
    rig = Rig(12, free_pool=2)
    loads = rig.stream(0, ALL, window=3)
    seen, version = [], 0
    while True:
        for part in rig.parts():
            loads += rig.due.loads
            assert part.table.from_version == version
            version = part.table.to_version
            seen += named(part)
            if named(part):
                rig.cache.consume(1, seen[-1])
            if part.final:
                assert seen == ALL
                return
        loads += rig.take()
        rig.cache.finish(loads.pop(0))


def test_a_part_is_sent_at_once_where_the_engine_waits_and_gathered_where_it_does_not():
    rig = Rig(24, n_experts=24)
    loads = rig.stream(0, range(12), window=8)
    rig.cache.finish(loads[0])
    assert [named(part) for part in rig.parts()] == [[0]]
    rig.cache.finish(loads[1])
    assert rig.parts() == []
    rig.cache.finish(loads[2])
    assert [named(part) for part in rig.parts()] == [[1, 2]]


def test_hits_are_named_in_their_turn_and_are_never_victims_of_their_own_stream():
    rig = Rig(6)
    rig.get(0, [9, 10])
    assert rig.run_stream(0, ALL, window=2) == 14
    assert rig.cache.counters.n_hits == 2
    assert {(0, 9), (0, 10)} <= rig.resident()


def test_a_slot_is_not_written_before_its_expert_is_consumed():
    rig = Rig(3)
    loads = rig.stream(0, ALL, window=8)
    taken = {load.slot for load in loads}
    assert taken == {0, 1, 2}
    for load in loads:
        rig.cache.finish(load)
    rig.parts()
    assert rig.take() == []
    rig.cache.consume(1, 0)
    (load,) = rig.take()
    assert load.slot == loads[0].slot
    rig.cache.consume(1, 15)
    assert {one.slot for one in rig.take()} == {loads[1].slot, loads[2].slot}


def test_consumed_says_nothing_of_experts_that_were_not_named():
    rig = Rig(3)
    rig.stream(0, ALL, window=8)
    rig.cache.consume(1, 15)
    assert rig.take() == []


def test_a_prefill_larger_than_the_arena_leaves_three_quarters_of_it_to_the_decode_set():
    rig = Rig(40, n_layers=4, n_experts=32, free_pool=4)
    decode = {(layer, expert) for layer in range(4) for expert in range(9)}
    for _ in range(3):
        for layer in range(4):
            rig.get(layer, range(9))
            rig.ack()
    before = rig.resident()
    assert before == decode
    for _ in range(2):
        for layer in range(4):
            rig.run_stream(layer, range(32), window=6)
            rig.ack()
    kept = before & rig.resident()
    assert len(kept) >= 40 * 3 // 4 - 4
    streamed = rig.resident() - before
    assert len(streamed) <= 40 // 4


def test_an_empty_arena_is_filled_by_a_stream():
    rig = Rig(32, free_pool=2)
    rig.run_stream(0, ALL)
    rig.run_stream(1, ALL)
    assert len(rig.resident()) == 30
    assert rig.run_stream(0, ALL) < 16


def test_streamed_experts_are_the_first_victims_unless_decoding_used_them():
    rig = Rig(16, free_pool=0)
    rig.run_stream(0, range(8), window=8)
    rig.get(1, range(8))
    rig.get(0, [3])
    for expert in range(8, 15):
        rig.get(1, [expert])
    assert {key for key in rig.resident() if key[0] == 0} == {(0, 3)}
    assert {(1, expert) for expert in range(15)} <= rig.resident()


def test_a_later_chunk_meets_what_an_earlier_one_left():
    rig = Rig(16, free_pool=0)
    rig.run_stream(0, ALL, window=2)
    first = rig.run_stream(1, ALL, window=2)
    assert first == 16
    assert rig.run_stream(0, ALL, window=2) <= 4


def test_streams_score_lowest_in_the_headers():
    rig = Rig(16, free_pool=0)
    for _ in range(3):
        rig.get(1, range(4))
        rig.step += 1
    rig.run_stream(0, range(4))
    headers = rig.memory.headers
    ready = headers[headers["state"] == 2]
    streamed = ready[ready["layer"] == 0]["score"]
    assert streamed.max() <= ready[ready["layer"] == 1]["score"].min()


def test_an_expert_that_cannot_be_read_is_named_in_its_part_and_the_others_come():
    rig = Rig(12)
    loads = rig.stream(0, [1, 2, 3], window=2)
    rig.cache.fail(loads[0], "EIO", "bad")
    rig.cache.finish(loads[1])
    (last,) = rig.take()
    rig.cache.finish(last)
    parts = rig.parts()
    assert [(fault.expert, fault.code) for part in parts for fault in part.errors] == [(1, "EIO")]
    assert [expert for part in parts for expert in named(part)] == [2, 3]


def test_the_next_of_experts_that_cannot_be_read_is_begun_though_nothing_is_consumed():
    rig = Rig(4)
    rig.get(1, [1, 2, 3, 4])
    (load,) = rig.stream(0, [0, 1], window=1)
    rig.cache.fail(load, "EIO", "bad")
    (next_load,) = rig.take()
    assert next_load.expert == 1


def test_cancel_ends_a_stream_with_every_change_since_it_began():
    rig = Rig(12)
    rig.get(1, [0])
    began = rig.applied
    loads = rig.stream(0, [1, 2, 3], window=2)
    rig.cache.finish(loads[0])
    rig.parts()
    rig.cache.cancel(rig.request)
    (part,) = rig.parts()
    assert part.final
    assert part.table.from_version == began
    assert [fault.code for fault in part.errors] == ["CANCELLED", "CANCELLED"]
    assert part.slots == (-1, -1, -1)
    rig.cache.check()


def test_a_stream_again_is_answered_once_and_afterwards_with_nothing_more():
    rig = Rig(12)
    request = (1, 1, 0, [1, 2], 4, (), 0, 0)
    rig.cache.open_stream(*request)
    rig.cache.open_stream(*request)
    loads = rig.take()
    assert len(loads) == 2
    for load in loads:
        rig.cache.finish(load)
    assert [expert for part in rig.parts() for expert in named(part)] == [1, 2]
    rig.cache.open_stream(*request)
    (part,) = rig.parts()
    assert part.final
    assert part.errors == ()
    with pytest.raises(RequestRefused, match="under the same number"):
        rig.cache.open_stream(1, 1, 0, [1, 3], 4, (), 0, 0)


def test_what_is_said_of_many_experts_is_short():
    rig = Rig(12, n_experts=3000)
    rig.cache.open_stream(1, 1, 0, range(2999), 4, (), 0, 0)
    with pytest.raises(RequestRefused, match=r"2999 experts .* was layer 0 2999 ") as refused:
        rig.cache.open_stream(1, 1, 0, range(1, 3000), 4, (), 0, 0)
    assert len(str(refused.value)) < 300


def test_where_every_slot_is_leased_a_stream_fails_and_does_not_wait():
    rig = Rig(2)
    rig.cache.fetch(7, 1, [(1, 0), (1, 1)])
    for load in rig.cache.drain().loads:
        rig.cache.finish(load)
    rig.take()
    assert rig.stream(0, [1, 2]) == []
    (part,) = rig.parts()
    assert {fault.code for fault in part.errors} == {"NO_SLOT"}


def test_the_next_layer_is_read_when_all_of_this_one_have_their_place():
    rig = Rig(16, free_pool=2)
    loads = rig.stream(0, [1, 2, 3], window=3, ahead=[(1, expert) for expert in range(8)])
    assert [(load.expert, load.purpose) for load in loads] == [
        (1, Purpose.DEMAND),
        (2, Purpose.DEMAND),
        (3, Purpose.DEMAND),
    ]
    rig.cache.finish(loads[0])
    rig.parts()
    rig.cache.consume(1, 1)
    (ahead,) = rig.take()
    assert (ahead.layer, ahead.expert, ahead.purpose) == (1, 0, Purpose.AHEAD)
    rig.cache.finish(loads[1])
    rig.cache.finish(loads[2])
    assert rig.parts()[-1].final
    assert [load.expert for load in rig.due.loads] == [1, 2]  # into free slots, from then on
    rig.cache.finish(ahead)
    rig.ack()
    rig.take()
    rig.stream(1, [0, 1, 5], window=3)
    assert rig.cache.counters.n_adopted >= 1
    assert rig.cache.counters.n_hits == 1


def test_what_was_read_ahead_in_vain_is_given_up_when_its_layer_has_passed():
    rig = Rig(16, free_pool=2)
    loads = rig.stream(0, [1], window=3, ahead=[(1, 7)])
    (ahead,) = [load for load in loads if load.purpose is Purpose.AHEAD]
    rig.cache.finish(loads[0])
    rig.parts()
    rig.step -= 1  # the same step
    rig.stream(1, [3], window=3)
    assert rig.due.unwanted == [ahead]
    rig.cache.fail(ahead, "CANCELLED", "given up")
    rig.cache.check()


def test_readers_are_served_while_a_stream_stays_open():
    rig = Rig(12, free_pool=2, lease_quota=8)
    for expert in range(10):
        rig.get(1, [expert])
    rig.ack()
    loads = rig.stream(0, range(8), window=3)
    rig.cache.fetch(7, 1, [(1, 12), (1, 13), (1, 14)])
    fetched = [load for load in rig.take() if load.purpose is Purpose.FETCH]
    assert [load.expert for load in fetched] == [12, 13, 14]
    kept = {load.slot for load in loads}
    assert not kept & {load.slot for load in fetched}
    for load in fetched:
        rig.cache.finish(load)
    rig.take()
    assert len(rig.due.fetches[0].leases) == 3
    rig.cache.check()


def test_an_expert_that_was_not_foreseen_is_read_though_later_ones_fill_the_window():
    rig = Rig(10)
    first, *ahead = rig.stream(0, [0], window=5, ahead=[(1, expert) for expert in range(1, 5)])
    assert [load.expert for load in ahead] == [1, 2, 3, 4]
    rig.cache.finish(first)
    assert rig.parts()[-1].final
    rig.step -= 1  # the same step
    (awaited,) = rig.stream(1, range(6), window=4)
    assert (awaited.expert, awaited.purpose) == (0, Purpose.DEMAND)
    for load in [*ahead, awaited]:
        rig.cache.finish(load)
    assert [named(part) for part in rig.parts()] == [[0, 1, 2, 3, 4]]
    assert rig.due.loads == []


def test_where_a_streams_own_experts_have_every_slot_the_last_of_them_leaves_for_the_next():
    rig = Rig(4)
    rig.get(0, [9, 10, 11, 12])
    assert rig.run_stream(0, [3, 9, 10, 11, 12]) == 2
    assert {(0, 12)} < rig.resident()  # read again, into whose slot it was
    rig.cache.check()


def test_a_stream_whose_engine_waits_does_not_wait_for_reads_for_readers():
    rig = Rig(3)
    rig.get(1, [0])
    rig.cache.fetch(7, 1, [(1, 8), (1, 9)])
    assert len(rig.take()) == 2
    (load,) = rig.stream(0, [0], window=1)
    assert load.expert == 0


def test_a_stream_fails_only_when_no_read_for_a_reader_may_free_a_slot():
    rig = Rig(2)
    rig.cache.fetch(7, 1, [(1, 0), (1, 1)])
    first, second = rig.take()
    assert rig.stream(0, [1]) == []
    assert rig.parts() == []
    rig.cache.finish(first)
    assert rig.parts() == []
    rig.cache.fail(second, "EIO", "bad")
    (load,) = rig.take()
    assert load.expert == 1


@given(st.data())
def test_every_stream_ends_whatever_was_read_ahead_and_has_left(data: st.DataObject):
    draw = data.draw
    n_slots = draw(st.integers(3, 24))
    rig = Rig(n_slots, n_layers=3, free_pool=draw(st.integers(0, n_slots // 3)))
    some = st.sets(st.integers(0, 15), min_size=1).map(sorted)
    loads = []
    for _ in range(draw(st.integers(1, 5))):
        if draw(st.booleans()):
            few = draw(some)[: n_slots // 3]
            rig.ask(draw(st.integers(0, 2)), few)
            loads += rig.due.loads
            while rig.cache.window_open:
                rig.cache.finish(loads.pop(draw(st.integers(0, len(loads) - 1))))
                loads += rig.take()
            rig.parts()
            if draw(st.booleans()):
                rig.ack()
        for layer in range(3):
            finish_stream(rig, layer, loads, draw)


def finish_stream(rig, layer, loads, draw):
    """Serve a stream of some experts, some of the next layer's read ahead, reads in any order."""
    some = st.sets(st.integers(0, 15), min_size=1).map(sorted)
    experts = draw(some)
    ahead = [(layer + 1, expert) for expert in draw(some)] if layer < 2 else []
    loads += rig.stream(layer, experts, window=draw(st.integers(1, 6)), ahead=ahead)
    seen: list[int] = []
    while True:
        parts = rig.parts()
        loads += rig.due.loads
        for part in parts:
            assert part.errors == ()
            seen += named(part)
            if named(part):
                rig.cache.consume(part.request, seen[-1])
        if any(part.final for part in parts):
            assert seen == experts
            rig.cache.check()
            return
        loads += rig.take()
        if not parts:
            assert loads, f"layer {layer}: {experts} waits for nothing after {seen}"
            rig.cache.finish(loads.pop(draw(st.integers(0, len(loads) - 1))))
