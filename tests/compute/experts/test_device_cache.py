"""The device cache: what is kept, what leaves, and that slots are never shared."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from compute.experts.device_cache import ABSENT, ON_DEVICE, UPPER_HALF, DeviceCache, keys_of

N_KEYS = 12


def keys(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def promoted(cache: DeviceCache, *numbers: int, most: int = 8) -> list[int]:
    begun = cache.begin(keys(*numbers), most)
    for promotion in begun:
        cache.finish(promotion)
    return [promotion.key for promotion in begun]


def test_a_cache_with_room_takes_what_comes_the_best_first() -> None:
    cache = DeviceCache(N_KEYS, 2)
    cache.use(keys(3, 5))
    cache.use(keys(5))
    assert promoted(cache, 3, 5) == [5, 3]
    assert sorted(cache.resident.tolist()) == [3, 5]


def test_a_full_cache_gives_up_the_least_used_key_only_for_a_better_one() -> None:
    cache = DeviceCache(N_KEYS, 2)
    for _ in range(3):
        cache.use(keys(0, 1))
    promoted(cache, 0, 1)
    cache.use(keys(2))
    assert promoted(cache, 2) == []
    for _ in range(4):
        cache.use(keys(2, 1))
    assert promoted(cache, 2) == [2]
    assert sorted(cache.resident.tolist()) == [1, 2]


def test_a_key_must_beat_the_lowest_by_a_use() -> None:
    cache = DeviceCache(N_KEYS, 1)
    for _ in range(2):
        cache.use(keys(0, 1))
    assert promoted(cache, 0) == [0]
    assert promoted(cache, 1) == []  # as good: else two keys would take turns for ever
    cache.use(keys(1))
    assert promoted(cache, 1) == [1]


def test_what_was_used_much_once_gives_way_to_what_is_used_now() -> None:
    cache = DeviceCache(N_KEYS, 1)
    for _ in range(6):
        cache.use(keys(0, 1))
    cache.use(keys(1))
    assert promoted(cache, 0) == [0]
    assert promoted(cache, 1) == [1]  # whoever is used from now on is as old as the one that left
    for _ in range(2):
        cache.use(keys(2))
    assert promoted(cache, 2) == [2]
    cache.use(keys(0))
    assert cache._scores[0] == 7 + 4  # the age of the last victim, and of its own six uses half


def test_no_more_keys_move_than_a_step_may() -> None:
    cache = DeviceCache(N_KEYS, 6)
    cache.use(keys(0, 1, 2, 3))
    assert len(promoted(cache, 0, 1, 2, 3, most=3)) == 3
    assert promoted(cache, 0, 1, 2, 3, most=0) == []


def test_a_slot_whose_key_did_not_arrive_is_free_again() -> None:
    cache = DeviceCache(N_KEYS, 1)
    cache.use(keys(4))
    (begun,) = cache.begin(keys(4), 1)
    assert cache.begin(keys(4), 1) == []  # it is on its way
    cache.abandon(begun)
    assert promoted(cache, 4) == [4]


def test_the_bytes_for_the_daemon_name_the_upper_half() -> None:
    cache = DeviceCache(N_KEYS, 4)
    for _ in range(5):
        cache.use(keys(1, 2))
    cache.use(keys(3, 4))
    promoted(cache, 1, 2, 3, 4)
    tier = cache.tier_bytes()
    assert tier[[1, 2]].tolist() == [UPPER_HALF] * 2
    assert tier[[3, 4]].tolist() == [ON_DEVICE] * 2
    assert tier[0] == ABSENT


def test_keys_count_through_the_layers() -> None:
    assert keys_of([0, 2], [5, 1], 10).tolist() == [5, 21]


STEPS = st.lists(
    st.tuples(
        st.lists(st.integers(0, N_KEYS - 1), min_size=1, max_size=4, unique=True),
        st.integers(0, 3),
        st.lists(st.booleans(), min_size=3, max_size=3),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=60)
@given(n_slots=st.integers(0, 5), steps=STEPS)
def test_no_slot_holds_two_keys_and_no_key_two_slots(
    n_slots: int, steps: list[tuple[list[int], int, list[bool]]]
) -> None:
    cache = DeviceCache(N_KEYS, n_slots)
    moving: list = []
    for used, most, arrived in steps:
        cache.use(keys(*used))
        moving += cache.begin(keys(*used), most)
        taken = [promotion.slot for promotion in moving]
        assert len(set(taken)) == len(taken)
        assert all(cache.key_in[slot] < 0 for slot in taken)
        for fine, promotion in zip(arrived, list(moving), strict=False):
            moving.remove(promotion)
            (cache.finish if fine else cache.abandon)(promotion)
        for slot, key in enumerate(cache.key_in.tolist()):
            assert key < 0 or cache.slot_of[key] == slot
        assert (cache.slot_of >= 0).sum() == (cache.key_in >= 0).sum()


def test_a_key_that_is_dropped_leaves_its_slot_free() -> None:
    cache = DeviceCache(N_KEYS, 1)
    promoted(cache, 4)
    cache.drop(4)
    assert not len(cache.resident)
    assert promoted(cache, 5) == [5]
