"""Which residents the arena gives up first beside a device cache."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_daemon.policy import POLICIES, LfuAging, make_policy
from expert_daemon.tiers import ABSENT, ON_DEVICE, UPPER_HALF, TieredPolicy

N_KEYS, N_SLOTS = 40, 20


def tiered(name="lfu-da", n_slots=N_SLOTS):
    tier = np.zeros((4, N_KEYS // 4), np.uint8)
    policy = TieredPolicy(make_policy(name, N_KEYS), tier)
    for key in range(n_slots):
        policy.use(np.array([key]))
        policy.admit(key)
    return policy, tier.reshape(-1)


def test_upper_half_keys_go_first_in_the_order_of_their_scores():
    policy, tier = tiered()
    tier[20:26] = ON_DEVICE
    tier[[9, 7]] = UPPER_HALF
    policy.use(np.array([7]))
    assert policy.victims(4, ()) == [9, 7, 0, 1]
    assert policy.victims(3, {9, 0}) == [7, 1, 2]


def test_beside_a_small_device_cache_the_scores_alone_decide():
    policy, tier = tiered()
    tier[5:12] = UPPER_HALF  # 7 of 20
    assert policy.victims(2, ()) == [0, 1]
    tier[39] = ON_DEVICE  # 8: the rule holds
    assert policy.victims(2, ()) == [5, 6]
    tier[5] = ABSENT
    assert policy.victims(2, ()) == [0, 1]


def test_the_arenas_size_is_what_it_holds_now():
    policy, tier = tiered()
    tier[5:12] = UPPER_HALF
    for key in range(12, 15):  # 17 residents, 0.4 of them are 6.8
        policy.drop(key)
    assert policy.victims(2, ()) == [5, 6]


def test_lower_half_keys_stay_by_their_scores():
    policy, tier = tiered()
    tier[3:20] = ON_DEVICE
    assert policy.victims(2, ()) == [0, 1]


def test_a_victim_that_the_device_keeps_ages_nobody():
    policy, tier = tiered()
    for _ in range(9):
        policy.use(np.array([5]))
    tier[30:38] = ON_DEVICE
    tier[5] = UPPER_HALF
    (victim,) = policy.victims(1, ())
    assert victim == 5
    policy.evict(victim)
    policy.admit(30)
    assert policy.figures(30)[0] == 0
    policy.evict(0)  # score 1: everybody ages by that
    policy.admit(31)
    assert policy.figures(31)[0] == 1


def test_any_byte_is_believed_no_further_than_its_meaning():
    policy, tier = tiered()
    tier[:] = 255
    assert policy.victims(N_KEYS, ()) == untiered().victims(N_KEYS, ())


def untiered():
    policy = LfuAging(N_KEYS)
    for key in range(N_SLOTS):
        policy.use(np.array([key]))
        policy.admit(key)
    return policy


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=60, deadline=None)
@given(
    tiers=st.lists(st.integers(0, 3), min_size=N_KEYS, max_size=N_KEYS),
    excluded=st.sets(st.integers(0, N_KEYS - 1)),
    n=st.integers(1, N_KEYS),
)
def test_victims_are_residents_each_once_and_never_excluded(name, tiers, excluded, n):
    policy, tier = tiered(name)
    tier[:] = tiers
    victims = policy.victims(n, excluded)
    open_to = set(policy.residents().tolist()) - excluded
    assert len(victims) == len(set(victims)) == min(n, len(open_to))
    assert set(victims) <= open_to
    upper = [tiers[key] == UPPER_HALF for key in victims]
    if N_KEYS - tiers.count(ABSENT) >= 0.4 * N_SLOTS:
        assert upper == sorted(upper, reverse=True)
        assert sum(upper) == min(n, sum(tiers[key] == UPPER_HALF for key in open_to))
