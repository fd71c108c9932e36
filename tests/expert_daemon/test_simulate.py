"""Figures of a simulation: what they are means of, and the caches that sizes mean."""

from __future__ import annotations

import math

import numpy as np
import pytest

from expert_daemon.budget import plan_arena
from expert_daemon.policy import POLICIES
from expert_daemon.routing_trace import RoutingTrace, TraceShape
from expert_daemon.simulate import Disk, plan_setting, simulate
from expert_daemon.synthetic_trace import FLASH, synthetic_trace
from protocol.errors import ConfigError

SMALL = TraceShape(8, 96, 4, expert_bytes=4000, slot_bytes=4096)
DISK = Disk(bytes_per_s=1e6, latency_ms=0.5)


def test_every_policy_and_the_optimum_come_for_every_setting():
    trace = synthetic_trace("skewed", 120, shape=SMALL)
    settings = [plan_setting(SMALL, share) for share in ("20%", "50%")]
    figures = list(simulate(trace, settings, list(POLICIES), DISK))
    assert [one.policy for one in figures] == [*POLICIES, "optimum"] * 2
    for one in figures:
        assert one.n_tokens == 90
        assert one.hit_rate == pytest.approx(1 - one.misses / 32)
        assert one.read_bytes == pytest.approx(one.misses * 4000)
        assert one.stall_ms == pytest.approx(one.bursts * 0.5 + one.misses * 4)
        assert one.tokens_per_s == pytest.approx(1000 / one.stall_ms)
        assert one.bursts <= min(8, one.misses)
        assert one.device_hit_rate == 0
    for few, many in zip(figures[:4], figures[4:], strict=True):
        assert many.misses < few.misses
    assert min(figures[:4], key=lambda one: one.misses).policy == "optimum"


def test_tokens_of_the_warm_up_and_chunks_are_replayed_but_not_counted():
    shape = TraceShape(1, 100, 2, expert_bytes=1, slot_bytes=4096)
    keys = np.array([0, 1, *range(2, 12), 2, 3, 20, 21])
    starts = np.array([0, 2, 12, 14, 16])
    trace = RoutingTrace(shape, keys, starts, np.array([True, False, True, True]))
    setting = plan_setting(shape, "100%")
    for warm_up, n_tokens, misses in ((0, 3, 4 / 3), (1, 2, 1), (2, 1, 2)):
        one, _ = simulate(trace, [setting], ["lru"], DISK, warm_up=warm_up)
        assert one.n_tokens == n_tokens
        assert one.misses == pytest.approx(misses)
    with pytest.raises(ConfigError, match="3 tokens, 3 are for warming up"):
        list(simulate(trace, [setting], ["lru"], DISK, warm_up=3))


def test_no_misses_mean_no_stall_and_no_bound():
    trace = synthetic_trace("skewed", 3000, shape=TraceShape(1, 20, 2, 4000, 4096))
    one, best = simulate(trace, [plan_setting(trace.shape, "100%")], ["lru"], DISK)
    assert one.misses == best.misses == one.stall_ms == 0
    assert one.tokens_per_s == math.inf
    assert one.as_json()["tokens_per_s_at_most"] is None


def test_a_size_holds_what_the_daemon_would_hold():
    setting = plan_setting(FLASH, "64GiB")
    plan = plan_arena(
        64 << 30, top_k_batch=6, n_keys=FLASH.n_keys, bytes_of=lambda n: n * FLASH.slot_bytes
    )
    assert 0 <= plan.n_slots - setting.n_slots <= 1  # the bookkeeping
    assert setting.n_resident == setting.n_slots - 64
    assert setting.max_experts == plan.budget.max_experts - (plan.n_slots - setting.n_slots)


@pytest.mark.parametrize("share", ["0.1%", "1%", "30%", "100 %", " 33.3% "])
def test_a_share_holds_that_share_of_all_experts(share):
    setting = plan_setting(FLASH, share)
    wanted = round(float(share.strip(" %")) / 100 * 15360)
    assert setting.n_resident == wanted
    assert setting.arena_bytes >= setting.n_slots * FLASH.slot_bytes


def test_a_device_cache_is_given_as_a_size_or_a_share():
    assert plan_setting(FLASH, "30%").n_device == 0
    assert plan_setting(FLASH, "30%", device="10%").n_device == 1536
    assert plan_setting(FLASH, "30%", device="18800640").n_device == 1
    assert plan_setting(FLASH, "30%", device="900TB").n_device == 15360


@pytest.mark.parametrize(
    ("arena", "text"),
    [
        ("500MiB", "smallest: "),
        ("plenty", "'plenty' is not a size"),
        ("0%", "0% of 15360 experts is 0, wanted 6 to 15360"),
        ("101%", "wanted 6 to 15360"),
        ("", "'' is not a size"),
    ],
)
def test_an_arena_that_cannot_be_is_refused(arena, text):
    with pytest.raises(ConfigError, match=text):
        plan_setting(FLASH, arena)


def test_the_tier_rule_can_be_forced_and_decides_reads_alone():
    trace = synthetic_trace("drift", 400, shape=SMALL)
    figures = {}
    for rule in ("auto", "on", "off"):
        setting = plan_setting(SMALL, "40%", device="30%", tier_rule=rule)
        figures[rule], _ = simulate(trace, [setting], ["lfu-da"], DISK)
    assert figures["on"].misses < figures["off"].misses
    assert figures["auto"].misses < figures["off"].misses
    rates = {round(one.device_hit_rate, 3) for one in figures.values()}
    assert max(rates) - min(rates) < 0.02
    assert min(rates) > 0.3
