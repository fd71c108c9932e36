from __future__ import annotations

import random

import numpy as np
import pytest

from expert_daemon.policy import POLICIES, make_policy
from expert_daemon.policy_section import PolicySection

N_KEYS = 40


def lived(name, seed):
    """A policy with a past: uses, admissions, evictions."""
    chance = random.Random(seed)
    policy = make_policy(name, N_KEYS)
    resident: set[int] = set()
    for _ in range(300):
        policy.use(np.array(sorted(chance.sample(range(N_KEYS), 3)), np.int64))
        key = chance.randrange(N_KEYS)
        if key not in resident:
            policy.admit(key)
            resident.add(key)
        while len(resident) > 12:
            (victim,) = policy.victims(1, ())
            policy.evict(victim)
            resident.remove(victim)
    return policy


def successor(policy, section):
    """What the next daemon makes of the arena's section and of the slot headers."""
    after = make_policy(policy.name, N_KEYS)
    assert section.load(after)
    after.restore([(key, *policy.figures(key)) for key in policy.residents().tolist()])
    return after


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"lru-random"}))
def test_the_next_policy_evicts_as_this_one_would_have(name):
    for seed in range(5):
        policy = lived(name, seed)
        section = PolicySection(np.zeros(4096 + 16 * N_KEYS, np.uint8), N_KEYS)
        section.save(policy)
        after = successor(policy, section)
        assert after.victims(12, ()) == policy.victims(12, ())
        absent = min(set(range(N_KEYS)) - set(policy.residents().tolist()))
        for one in (policy, after):
            one.use(np.arange(0, N_KEYS, 3))
            one.admit(absent)
        assert after.victims(5, ()) == policy.victims(5, ())


def test_keys_that_are_not_there_keep_what_they_earned():
    policy = make_policy("lfu-da", N_KEYS)
    for _ in range(5):
        policy.use(np.array([7], np.int64))
    section = PolicySection(np.zeros(4096 + 16 * N_KEYS, np.uint8), N_KEYS)
    section.save(policy)
    after = successor(policy, section)
    after.admit(7)
    assert after.figures(7)[0] == 5.0


def test_another_policys_memory_or_none_or_nonsense_is_not_taken():
    raw = np.zeros(4096 + 16 * N_KEYS, np.uint8)
    section = PolicySection(raw, N_KEYS)
    assert not section.load(make_policy("lfu-da", N_KEYS))
    section.save(lived("lru", 1))
    assert not section.load(make_policy("lfu-da", N_KEYS))
    section.save(lived("lfu-da", 1))
    raw[4096:] = np.random.default_rng(1).integers(0, 256, 16 * N_KEYS)
    policy = make_policy("lfu-da", N_KEYS)
    assert section.load(policy)
    policy.restore([(3, 1.0, 1), (4, 2.0, 2)])
    policy.use(np.array([3], np.int64))
    assert sorted(policy.victims(2, ())) == [3, 4]
    raw[16:24] = 0xFF
    assert not section.load(make_policy("lfu-da", N_KEYS))


def test_the_stamp_before_it_is_left_alone():
    raw = np.zeros(4096 + 16 * N_KEYS, np.uint8)
    raw[:8] = 7
    PolicySection(raw, N_KEYS).save(lived("lfu-da", 2))
    assert (raw[:8] == 7).all()
