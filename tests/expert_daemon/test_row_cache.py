from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_daemon.row_cache import MOST_USES, WAYS, RowCache

key_lists = st.lists(st.integers(0, 60), max_size=24).map(lambda keys: np.array(keys, np.int64))


class SlowCache:
    """The same rule, key by key."""

    def __init__(self, cache):
        self.set_of = lambda key: int(cache._sets_of(np.array([key], np.int64))[0])
        self.sets: list[list[int | None]] = [[None] * WAYS for _ in range(cache.n_places // WAYS)]
        self.score = [[0] * WAYS for _ in self.sets]
        self.uses = [[0] * WAYS for _ in self.sets]
        self.level = [0] * len(self.sets)

    def _use(self, number, way):
        self.uses[number][way] = min(MOST_USES, self.uses[number][way] + 1)
        self.score[number][way] = self.level[number] + self.uses[number][way]

    def find(self, key):
        number = self.set_of(key)
        if key not in self.sets[number]:
            return -1
        return number * WAYS + self.sets[number].index(key)

    def use(self, place):
        self._use(*divmod(place, WAYS))

    def take(self, keys):
        places = {}
        for number, ways in enumerate(self.sets):
            mine = [key for key in keys if self.set_of(key) == number][:WAYS]
            score = self.score[number]
            victims = sorted(range(WAYS), key=lambda way: score[way])[: len(mine)]
            self.level[number] = max([self.level[number], *(score[way] for way in victims)])
            for key, way in zip(mine, victims, strict=True):
                ways[way] = key
                self.uses[number][way] = 0
                self._use(number, way)
                places[key] = number * WAYS + way
        return places


@settings(max_examples=60, deadline=None)
@given(batches=st.lists(key_lists, max_size=20))
def test_batches_do_what_the_rule_does_key_by_key(batches):
    cache = RowCache(3 * WAYS + 5)
    slow = SlowCache(cache)
    for keys in batches:
        found = cache.find(keys)
        assert found.tolist() == [slow.find(key) for key in keys.tolist()]
        for place in sorted({place for place in found.tolist() if place >= 0}):
            slow.use(place)
        absent = np.unique(keys[found < 0])
        taken = cache.take(absent)
        wanted = slow.take(absent.tolist())
        assert taken.tolist() == [wanted.get(key, -1) for key in absent.tolist()]
        held = [key for ways in slow.sets for key in ways if key is not None]
        assert len(set(held)) == len(held) == cache.n_held
        assert (cache._score.reshape(-1, WAYS) == np.array(slow.score)).all()


def test_what_is_asked_for_again_outlives_a_long_prompt():
    cache = RowCache(1024)
    hot = np.arange(100, dtype=np.int64)
    for _ in range(4):
        cache.take(hot[cache.find(hot) < 0])
    for first in range(1000, 21_000, 500):
        cold = np.arange(first, first + 500, dtype=np.int64)
        cache.take(cold[cache.find(cold) < 0])
        cache.find(hot)
    assert (cache.find(hot) >= 0).mean() > 0.9


def test_a_cache_without_room_holds_nothing():
    cache = RowCache(WAYS - 1)
    keys = np.arange(5, dtype=np.int64)
    assert (cache.take(keys) == -1).all() and (cache.find(keys) == -1).all()
