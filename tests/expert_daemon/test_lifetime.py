from __future__ import annotations

import numpy as np

from expert_daemon.lifetime import WORDS, Lifetime


def test_counts_go_on_where_the_predecessor_stopped():
    words = np.zeros(512, np.uint64)
    first = Lifetime(words, is_adopted=False)
    first.note({"reads": 3, "bytes_read": 1 << 40, "policy": "lru"})
    first.note({"reads": 5, "bytes_read": 1 << 41})
    second = Lifetime(words, is_adopted=True)
    assert second.values()["lifetime_reads"] == 5
    second.note({"reads": 2})
    values = second.values()
    assert (values["lifetime_daemons"], values["lifetime_reads"]) == (2, 7)
    assert values["lifetime_bytes_read"] == 1 << 41


def test_a_new_arena_counts_from_nothing():
    words = np.full(512, 9, np.uint64)
    lifetime = Lifetime(words, is_adopted=False)
    assert lifetime.values()["lifetime_daemons"] == 1
    assert sum(lifetime.values().values()) == 1
    assert len(WORDS) < len(words)
