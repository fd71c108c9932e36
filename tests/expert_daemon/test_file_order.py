"""Facts about keys in the order of the files."""

from __future__ import annotations

import numpy as np

from expert_daemon.file_order import FileOrder

N_LAYERS, N_EXPERTS = 3, 20


def place(key):
    layer, expert = key
    return layer % 2, (7 * expert + layer) % N_EXPERTS << 40


def test_keys_are_sorted_as_their_first_bytes_stand_in_the_files():
    order = FileOrder(place, N_LAYERS, N_EXPERTS)
    keys = np.arange(N_LAYERS * N_EXPERTS)[::-1]
    assert order.learn(keys, len(keys))
    wanted = [divmod(key, N_EXPERTS) for key in keys.tolist()]
    assert order.sorted(keys) == sorted(wanted, key=place)


def test_each_key_is_looked_up_once_and_so_many_at_a_time():
    looked_up = []

    def noted(key):
        looked_up.append(key)
        return place(key)

    order = FileOrder(noted, N_LAYERS, N_EXPERTS)
    keys = np.arange(5, 30)
    assert not order.learn(keys, 10)
    assert len(looked_up) == 10
    assert not order.learn(keys, 10)
    assert order.learn(keys, 10)
    assert order.learn(keys[3:8], 0)
    assert sorted(looked_up) == [divmod(key, N_EXPERTS) for key in range(5, 30)]


def test_no_keys_are_known_and_sorted_at_once():
    order = FileOrder(place, N_LAYERS, N_EXPERTS)
    none = np.zeros(0, np.int64)
    assert order.learn(none, 1)
    assert order.sorted(none) == []
