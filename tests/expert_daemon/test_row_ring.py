from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from expert_daemon.row_ring import RowRing

# gives, rows, first, end
ACTIONS = st.tuples(st.booleans(), st.integers(1, 30), st.integers(0, 40), st.integers(0, 50))


@given(st.integers(0, 50), st.lists(ACTIONS, max_size=60))
def test_regions_never_overlap_and_all_come_back(n_rows, actions):
    ring = RowRing(n_rows)
    taken: list[tuple[int, int]] = []
    for gives, n, first, end in actions:
        if gives and taken:
            ring.give(*taken.pop(n % len(taken)))
        else:
            position = ring.take(n, first, min(end, n_rows))
            if position is not None:
                assert first <= position <= min(end, n_rows) - n
                assert all(position + n <= p or p + m <= position for p, m in taken)
                taken.append((position, n))
        assert ring.n_free == n_rows - sum(m for _, m in taken)
    for region in taken:
        ring.give(*region)
    if n_rows:
        assert ring.take(n_rows) == 0
    assert ring.take(1) is None
