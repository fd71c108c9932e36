"""Each policy against a model that is slow and plain."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_daemon import ranking
from expert_daemon.policy import POLICIES, LfuAging, Lru, LruRandom, make_policy
from protocol.errors import ConfigError

N_KEYS = 24


class SlowLfuAging:
    """DESIGN.md section 8, word for word."""

    def __init__(self, n_keys=N_KEYS):
        self.age = 0.0
        self.count = dict.fromkeys(range(n_keys), 0.0)
        self.score = {}
        self.last_use = dict.fromkeys(range(n_keys), 0)
        self.residents = set()
        self.tick = 0

    def use(self, keys):
        for key in keys:
            self.tick += 1
            self.last_use[key] = self.tick
            self.count[key] = min(16, self.count[key] + 1)
            self.score[key] = self.age + self.count[key]

    def admit(self, key):
        if not self.last_use[key]:
            self.tick += 1
            self.last_use[key] = self.tick
        self.score[key] = self.age + self.count[key]
        self.residents.add(key)

    def evict(self, key):
        self.residents.remove(key)
        self.age = self.score[key]
        self.count[key] *= 0.5

    def drop(self, key):
        self.residents.remove(key)

    def victims(self, n, excluded):
        order = sorted(self.residents, key=lambda key: (self.score[key], self.last_use[key]))
        return [key for key in order if key not in excluded][:n]


class SlowLru(SlowLfuAging):
    def victims(self, n, excluded):
        order = sorted(self.residents, key=lambda key: self.last_use[key])
        return [key for key in order if key not in excluded][:n]


class SlowLruRandom(SlowLru):
    """Says what may be chosen: any of the oldest 8 %, the oldest others where those are too few."""

    def admissible(self, victims, n, excluded):
        order = self.victims(len(self.residents), ())
        oldest = order[: math.ceil(0.08 * len(order))]
        open_to = [key for key in oldest if key not in excluded]
        if n <= len(open_to):
            return set(victims) <= set(open_to)
        others = [key for key in order if key not in excluded and key not in open_to]
        wanted = set(open_to) | set(others[: n - len(open_to)])
        return set(victims) == wanted


keys = st.integers(0, N_KEYS - 1)
key_sets = st.sets(keys, max_size=6)
events = st.lists(
    st.one_of(
        st.tuples(st.just("use"), key_sets),
        st.tuples(st.just("admit"), keys),
        st.tuples(st.just("victims"), st.integers(1, 4), key_sets),
        st.tuples(st.just("evict"), st.integers(1, 4), key_sets),
        st.tuples(st.just("drop"), st.integers(1, 4), key_sets),
    ),
    max_size=120,
)


@pytest.fixture(params=[2, 128])
def front(request, monkeypatch):
    """The ranking's front small enough to run dry, and as it is."""
    monkeypatch.setattr(ranking, "FRONT", request.param)


PAIRS = [(LfuAging, SlowLfuAging), (Lru, SlowLru), (LruRandom, SlowLruRandom)]


def play(policy, model, happenings):
    for happening in happenings:
        match happening:
            case ("use", used):
                policy.use(np.array(sorted(used), np.int64))
                model.use(sorted(used))
            case ("admit", key) if key not in model.residents:
                policy.admit(key)
                model.admit(key)
            case ("victims" | "evict" | "drop" as what, n, excluded):
                victims = policy.victims(n, excluded)
                if isinstance(model, SlowLruRandom):
                    assert len(set(victims)) == len(model.victims(n, excluded)) == len(victims)
                    assert model.admissible(victims, n, excluded)
                else:
                    assert victims == model.victims(n, excluded)
                for key in victims if what != "victims" else []:
                    getattr(policy, what)(key)
                    getattr(model, what)(key)
        assert policy.residents().tolist() == sorted(model.residents)


@pytest.mark.parametrize(("policy", "model"), PAIRS)
@settings(max_examples=100)
@given(happenings=events)
def test_a_policy_chooses_what_its_slow_model_chooses(policy, model, happenings):
    play(policy(N_KEYS), model(), happenings)


@pytest.mark.parametrize(("policy", "model"), PAIRS)
@pytest.mark.usefixtures("front")
def test_a_long_life_chooses_what_the_slow_model_chooses(policy, model):
    draw = random.Random(1)
    happenings = []
    for _ in range(6000):
        some = set(draw.sample(range(N_KEYS), draw.randrange(5)))
        kinds: list[tuple] = [("use", some), ("admit", draw.randrange(N_KEYS))]
        n = draw.randrange(1, 3)
        kinds += [("evict", n, some), ("victims", 2, some), ("drop", n, some)]
        happenings.append(draw.choices(kinds, [8, 6, 2, 2, 1])[0])
    play(policy(N_KEYS), model(), happenings)


@pytest.mark.parametrize("name", ["lfu-da", "lru", "lru-random"])
def test_figures_show_the_score_and_the_last_use(name):
    policy = make_policy(name, N_KEYS)
    policy.use(np.array([3, 5]))
    policy.admit(5)
    assert policy.figures(5) == (policy.scores(np.array([5]))[0], 2)
    assert policy.last_uses(np.array([3, 4, 5])).tolist() == [1, 0, 2]


def test_a_count_stops_at_sixteen_and_is_halved_on_eviction():
    policy = LfuAging(N_KEYS)
    policy.admit(1)
    for _ in range(30):
        policy.use(np.array([1]))
    assert policy.figures(1)[0] == 16
    policy.evict(1)
    policy.admit(1)
    assert policy.figures(1)[0] == 16 + 8
    policy.admit(2)
    assert policy.figures(2)[0] == 16


@pytest.mark.parametrize("name", ["lfu-da", "lru"])
def test_a_restored_policy_goes_on_in_the_same_order(name):
    draw = random.Random(2)
    policy = make_policy(name, N_KEYS)
    for key in range(0, N_KEYS, 2):
        policy.admit(key)
    for _ in range(200):
        policy.use(np.array(sorted(draw.sample(range(N_KEYS), 3))))
    successor = make_policy(name, N_KEYS)
    successor.restore([(key, *policy.figures(key)) for key in policy.residents().tolist()])
    assert successor.victims(N_KEYS, ()) == policy.victims(N_KEYS, ())


def test_a_dropped_key_ages_nobody_and_keeps_its_count():
    policy = LfuAging(N_KEYS)
    policy.use(np.array([1]))
    policy.admit(1)
    policy.drop(1)
    policy.admit(1)
    assert policy.figures(1)[0] == 1


def filled_with(policy, n_keys):
    policy.use(np.arange(n_keys))
    for key in range(n_keys):
        policy.admit(key)
    return policy


def test_each_of_the_oldest_eight_percent_is_as_likely():
    policy = filled_with(LruRandom(1000), 1000)
    drawn = Counter(policy.victims(1, ())[0] for _ in range(8000))
    assert set(drawn) == set(range(80))
    assert max(abs(n - 100) for n in drawn.values()) < 50


def test_random_victims_stay_among_the_oldest_while_the_pool_shrinks_and_grows():
    policy, model = LruRandom(1000), SlowLru(1000)
    draw = random.Random(5)
    filled_with(policy, 800), filled_with(model, 800)
    for _ in range(1500):
        used = sorted(draw.sample(range(1000), 6))
        policy.use(np.array(used))
        model.use(used)
        order = model.victims(1000, ())
        victims = policy.victims(2, ())
        assert set(victims) <= set(order[: math.ceil(0.08 * len(order))])
        for key in victims[: draw.randrange(3)]:
            policy.evict(key)
            model.evict(key)
        for key in draw.sample(sorted(set(range(1000)) - model.residents), draw.randrange(3)):
            policy.admit(key)
            model.admit(key)


def test_a_loop_larger_than_the_cache_defeats_lru_and_not_its_random_brother():
    def hits(policy, n_slots=200, n_loop=201):
        n, resident = 0, set[int]()
        for use in range(20 * n_loop):
            key = use % n_loop
            policy.use(np.array([key]))
            n += key in resident
            if key not in resident:
                for victim in policy.victims(1, ()) if len(resident) == n_slots else []:
                    policy.evict(victim)
                    resident.remove(victim)
                policy.admit(key)
                resident.add(key)
        return n / (20 * n_loop)

    assert hits(Lru(201)) == 0
    assert hits(LruRandom(201)) > 0.7


def test_an_empty_policy_has_no_victims_and_restores_nothing():
    for name in POLICIES:
        policy = make_policy(name, N_KEYS)
        policy.restore([])
        assert policy.victims(3, ()) == []


def test_an_unknown_policy_is_a_config_error():
    with pytest.raises(ConfigError, match="'fifo', wanted one of lfu-da, lru, lru-random"):
        make_policy("fifo", N_KEYS)
