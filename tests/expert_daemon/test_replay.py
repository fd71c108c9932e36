"""The simulator misses what the daemon's slot cache would miss, and what a plain model says."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_daemon.device_tier import DeviceTier, tier_bytes
from expert_daemon.optimum import optimum
from expert_daemon.policy import POLICIES, make_policy
from expert_daemon.replay import ArenaTier, replay
from expert_daemon.routing_trace import RoutingTrace, TraceShape
from expert_daemon.synthetic_trace import RECIPES, synthetic_trace
from expert_daemon.tiers import TieredPolicy
from tests.support.caches import Rig

SHAPE = TraceShape(4, 16, 2, expert_bytes=100, slot_bytes=4096)


def misses(trace, n_resident, name, **how):
    n_keys = trace.shape.n_keys
    return replay(trace, ArenaTier(n_keys, n_resident, make_policy(name, n_keys), **how)).misses


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("kind", ["skewed", "recent"])
def test_the_slot_cache_misses_the_same_in_every_step(name, kind):
    trace = synthetic_trace(kind, 150, shape=SHAPE, seed=3)
    n_slots, free_pool = 24, 3
    rig = Rig(n_slots, n_layers=4, n_experts=16, free_pool=free_pool, policy=name)
    expected = misses(trace, n_slots - free_pool, name)
    for step, keys in enumerate(trace.steps()):
        before = rig.cache.counters.n_misses
        for layer in range(4):
            experts = [key - 16 * layer for key in keys.tolist() if key // 16 == layer]
            if not {(layer, expert) for expert in experts} <= rig.resident():
                answer = rig.get(layer, experts, step=step)
                assert min(answer.slots) >= 0
        rig.cache.touch(step, np.stack(np.divmod(keys, 16), axis=1).astype(np.uint16))
        rig.ack()
        assert rig.cache.counters.n_misses - before == expected[step]
    assert 0 < expected.sum() < len(trace.keys) / 2


class PlainLru:
    def __init__(self, n_resident):
        self.n_resident = n_resident
        self.order = []

    def use(self, keys):
        for key in keys:
            if key in self.order:
                self.order.remove(key)
                self.order.append(key)

    def window(self, keys):
        self.use(keys)
        absent = [key for key in keys if key not in self.order]
        while len(self.order) + len(absent) > self.n_resident:
            self.order.remove(next(key for key in self.order if key not in keys))
        for key in keys:
            if key in self.order:
                self.order.remove(key)
            self.order.append(key)
        return len(absent)


@st.composite
def traces(draw, chunks=True):
    steps = draw(st.lists(st.sets(st.integers(0, 15), max_size=8), max_size=20))
    keys = [sorted(step) for step in steps]
    starts = np.cumsum([0, *map(len, keys)])
    flat = np.array([key for step in keys for key in step], np.int64)
    shape = TraceShape(4, 4, 1, expert_bytes=1, slot_bytes=1)
    is_token = draw(st.lists(st.booleans(), min_size=len(keys), max_size=len(keys)))
    return RoutingTrace(shape, flat, starts, np.array(is_token if chunks else [True] * len(keys)))


@settings(max_examples=150, deadline=None)
@given(trace=traces(chunks=False), n_resident=st.integers(4, 16), max_experts=st.integers(1, 5))
def test_lru_misses_what_a_plain_model_misses(trace, n_resident, max_experts):
    model = PlainLru(n_resident)
    expected = []
    for step in trace.steps():
        n, seen = 0, set()
        for layer in range(4):
            own = [key for key in step.tolist() if key // 4 == layer]
            if set(own) <= set(model.order):
                continue
            first = next(at for at, key in enumerate(own) if key not in model.order)
            for at in range(0, len(own), max_experts):
                group = own[at : at + max_experts]
                if not set(group) <= set(model.order):
                    n += model.window(group)
                    seen |= set(group)
            assert first < len(own)
        model.use([key for key in step.tolist() if key not in seen])
        expected.append(n)
    assert misses(trace, n_resident, "lru", max_experts=max_experts).tolist() == expected


@settings(max_examples=60, deadline=None)
@given(trace=traces(), n_resident=st.integers(4, 16))
@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_beats_the_optimum(name, trace, n_resident):
    best = optimum(trace, n_resident)
    ours = misses(trace, n_resident, name)
    assert best.misses.sum() <= ours.sum()
    assert ours.sum() >= len(set(trace.keys.tolist()))


@settings(max_examples=60, deadline=None)
@given(trace=traces(), n_arena=st.integers(4, 12), n_device=st.integers(0, 8))
@pytest.mark.parametrize("rule", [0.0, 0.4, math.inf])
def test_two_tiers_never_beat_the_optimum_of_both_together(rule, trace, n_arena, n_device):
    device = DeviceTier(16, n_device)
    policy = TieredPolicy(make_policy("lfu-da", 16), device.tier, least_device_share=rule)
    arena = ArenaTier(16, n_arena, policy)
    counted = replay(trace, arena, device)
    assert arena.resident.sum() <= n_arena
    assert device.resident.sum() <= n_device
    assert arena.residents.residents().tolist() == np.flatnonzero(arena.resident).tolist()
    assert optimum(trace, n_arena + n_device).misses.sum() <= counted.misses.sum()
    assert (counted.misses <= counted.arena_picks).all()


def test_what_everything_fits_into_is_read_once():
    trace = synthetic_trace("flat", 100, shape=SHAPE)
    counted = replay(trace, ArenaTier(64, 64, make_policy("lfu-da", 64)))
    assert counted.misses.sum() == len(np.unique(trace.keys))
    assert counted.bursts[0] == 4
    assert (counted.arena_picks == 8).all()


def test_a_chunk_of_everything_takes_a_quarter_of_the_slots_and_no_more():
    decode = np.concatenate([np.arange(10) + 100 * layer for layer in range(4)])
    chunk = np.arange(400)
    shape = TraceShape(4, 100, 10, expert_bytes=1, slot_bytes=1)
    keys = np.concatenate([decode, decode, chunk, chunk, decode])
    starts = np.cumsum([0, 40, 40, 400, 400, 40])
    trace = RoutingTrace(shape, keys, starts, np.array([True, True, False, False, True]))
    arena = ArenaTier(400, 48, make_policy("lfu-da", 400))
    counted = replay(trace, arena)
    assert counted.misses[:2].tolist() == [40, 0]
    assert 360 <= counted.misses[2] <= 364  # 8 slots were free, so guests take 4 of the others'
    assert counted.misses[4] <= 4
    assert arena.resident.sum() == 48


def test_a_device_that_holds_everything_asks_the_arena_for_nothing():
    trace = synthetic_trace("flat", 200, shape=SHAPE)
    device = DeviceTier(64, 64)
    counted = replay(trace, ArenaTier(64, 8, make_policy("lru", 64)), device)
    assert counted.misses.sum() == len(np.unique(trace.keys)) == device.n_promoted
    assert counted.arena_picks[-1] == 0


def test_promotions_are_few_and_want_a_margin():
    device = DeviceTier(20, 4, most_promotions=1)
    device.end_step(np.arange(4), np.arange(4))
    device.end_step(np.arange(4), np.arange(0))
    assert np.flatnonzero(device.resident).tolist() == [0, 1, 2, 3]
    device.end_step(np.array([10, 11]), np.array([10, 11]))  # one use against two
    device.end_step(np.array([10, 11]), np.array([10, 11]))  # two against two
    assert device.n_promoted == 4
    device.end_step(np.array([10, 11]), np.array([10, 11]))  # three: both would, one may
    assert device.n_promoted == 5
    assert device.tier.tolist()[10] == 2


def test_half_of_the_device_is_its_upper_half():
    residents = np.array([3, 5, 7, 9, 11])
    tier = tier_bytes(residents, np.array([5.0, 1.0, 4.0, 2.0, 3.0]), 12)
    assert tier.tolist() == [0, 0, 0, 2, 0, 1, 0, 2, 0, 1, 0, 1]
    assert tier_bytes(residents[:1], np.array([1.0]), 4).tolist() == [0, 0, 0, 1]
    assert not tier_bytes(residents[:0], np.zeros(0), 4).any()


def test_the_rule_of_two_tiers_saves_a_quarter_of_the_reads_beside_a_large_device_cache():
    shape = TraceShape(8, 96, 4, expert_bytes=100, slot_bytes=4096)
    n_keys = shape.n_keys
    n_device, n_arena = int(0.3 * n_keys), int(0.45 * n_keys)
    for kind in ("skewed", "topics", "drift"):
        trace = synthetic_trace(kind, 600, shape=shape)
        reads = {}
        for rule in (0.4, math.inf):
            device = DeviceTier(n_keys, n_device)
            inner = make_policy("lfu-da", n_keys)
            policy = TieredPolicy(inner, device.tier, least_device_share=rule)
            reads[rule] = replay(trace, ArenaTier(n_keys, n_arena, policy), device).misses[200:]
        assert reads[0.4].sum() < 0.75 * reads[math.inf].sum(), kind


@pytest.mark.parametrize("kind", RECIPES)
def test_aging_frequencies_never_lose_much_to_lru_and_win_where_picks_are_uneven(kind):
    shape = TraceShape(8, 96, 4, expert_bytes=100, slot_bytes=4096)
    trace = synthetic_trace(kind, 600, shape=shape)
    for share in (0.1, 0.3, 0.6):
        rates = [
            misses(trace, int(share * shape.n_keys), name)[200:].mean() / shape.picks_per_token
            for name in ("lfu-da", "lru")
        ]
        assert rates[0] < rates[1] + 0.015
        if kind in {"skewed", "drift"}:
            assert rates[0] < 0.97 * rates[1]
