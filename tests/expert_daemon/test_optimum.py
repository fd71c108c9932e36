"""Belady's optimum against an exhaustive search, and as a bound."""

from __future__ import annotations

from functools import cache

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_daemon.optimum import next_uses, optimum
from expert_daemon.routing_trace import RoutingTrace, TraceShape

SHAPE = TraceShape(1, 6, 1, expert_bytes=1, slot_bytes=1)


def single_picks(keys):
    n = len(keys)
    starts = np.arange(n + 1, dtype=np.int64)
    return RoutingTrace(SHAPE, np.array(keys, np.int64), starts, np.ones(n, np.bool_))


def fewest_misses(keys, n_slots):
    @cache
    def from_here(place, held):
        if place == len(keys):
            return 0
        key = keys[place]
        if key in held:
            return from_here(place + 1, held)
        if len(held) < n_slots:
            return 1 + from_here(place + 1, held | {key})
        return 1 + min(from_here(place + 1, held - {out} | {key}) for out in held)

    return from_here(0, frozenset())


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=14), st.integers(1, 4))
def test_no_order_of_evictions_has_fewer_misses(keys, n_slots):
    assert optimum(single_picks(keys), n_slots).misses.sum() == fewest_misses(tuple(keys), n_slots)


def test_misses_and_waiting_layers_are_counted_in_their_steps():
    shape = TraceShape(2, 4, 2, expert_bytes=1, slot_bytes=1)
    keys = np.array([0, 1, 4, 5, 0, 1, 4, 6, 2, 3, 6, 7], np.int64)
    trace = RoutingTrace(shape, keys, np.array([0, 4, 8, 12]), np.ones(3, np.bool_))
    counted = optimum(trace, 8)
    assert counted.misses.tolist() == [4, 1, 3]
    assert counted.bursts.tolist() == [2, 1, 2]
    assert counted.arena_picks.tolist() == [4, 4, 4]


def test_the_next_use_is_found():
    assert next_uses(np.array([3, 1, 3, 3, 1])).tolist() == [2, 4, 3, 5, 5]
    assert next_uses(np.zeros(0, np.int64)).tolist() == []
