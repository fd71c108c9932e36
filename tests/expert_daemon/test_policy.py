"""Each policy against a model that is slow and plain."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_daemon import ranking
from expert_daemon.policy import LfuAging, Lru, make_policy
from protocol.errors import ConfigError

N_KEYS = 24


class SlowLfuAging:
    """DESIGN.md section 8, word for word."""

    def __init__(self):
        self.age = 0.0
        self.count = dict.fromkeys(range(N_KEYS), 0.0)
        self.score = {}
        self.last_use = dict.fromkeys(range(N_KEYS), 0)
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

    def victims(self, n, excluded):
        order = sorted(self.residents, key=lambda key: (self.score[key], self.last_use[key]))
        return [key for key in order if key not in excluded][:n]


class SlowLru(SlowLfuAging):
    def victims(self, n, excluded):
        order = sorted(self.residents, key=lambda key: self.last_use[key])
        return [key for key in order if key not in excluded][:n]


keys = st.integers(0, N_KEYS - 1)
key_sets = st.sets(keys, max_size=6)
events = st.lists(
    st.one_of(
        st.tuples(st.just("use"), key_sets),
        st.tuples(st.just("admit"), keys),
        st.tuples(st.just("victims"), st.integers(1, 4), key_sets),
        st.tuples(st.just("evict"), st.integers(1, 4), key_sets),
    ),
    max_size=120,
)


@pytest.fixture(params=[2, 128])
def front(request, monkeypatch):
    """The ranking's front small enough to run dry, and as it is."""
    monkeypatch.setattr(ranking, "FRONT", request.param)


def play(policy, model, happenings):
    for happening in happenings:
        match happening:
            case ("use", used):
                policy.use(np.array(sorted(used), np.int64))
                model.use(sorted(used))
            case ("admit", key) if key not in model.residents:
                policy.admit(key)
                model.admit(key)
            case ("victims" | "evict" as what, n, excluded):
                victims = policy.victims(n, excluded)
                assert victims == model.victims(n, excluded)
                for key in victims if what == "evict" else []:
                    policy.evict(key)
                    model.evict(key)
        assert policy.residents().tolist() == sorted(model.residents)


@pytest.mark.parametrize(("policy", "model"), [(LfuAging, SlowLfuAging), (Lru, SlowLru)])
@settings(max_examples=100)
@given(happenings=events)
def test_a_policy_chooses_what_its_slow_model_chooses(policy, model, happenings):
    play(policy(N_KEYS), model(), happenings)


@pytest.mark.parametrize(("policy", "model"), [(LfuAging, SlowLfuAging), (Lru, SlowLru)])
@pytest.mark.usefixtures("front")
def test_a_long_life_chooses_what_the_slow_model_chooses(policy, model):
    draw = random.Random(1)
    happenings = []
    for _ in range(6000):
        some = set(draw.sample(range(N_KEYS), draw.randrange(5)))
        kinds: list[tuple] = [("use", some), ("admit", draw.randrange(N_KEYS))]
        kinds += [("evict", draw.randrange(1, 3), some), ("victims", 2, some)]
        happenings.append(draw.choices(kinds, [4, 3, 1, 1])[0])
    play(policy(N_KEYS), model(), happenings)


@pytest.mark.parametrize("name", ["lfu-da", "lru"])
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


def test_an_empty_policy_has_no_victims_and_restores_nothing():
    policy = LfuAging(N_KEYS)
    policy.restore([])
    assert policy.victims(3, ()) == []


def test_an_unknown_policy_is_a_config_error():
    with pytest.raises(ConfigError, match="'fifo', wanted one of lfu-da, lru"):
        make_policy("fifo", N_KEYS)
