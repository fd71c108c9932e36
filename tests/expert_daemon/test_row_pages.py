from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from expert_daemon.row_pages import PAGES_AT_ONCE, most_bytes, plan_page_reads

PAGE = 64  # small, so that a few rows span many


@given(
    rows=st.sets(st.integers(0, 900), min_size=1, max_size=60),
    width=st.integers(1, 150),
    base=st.integers(0, 200),
    place=st.integers(0, 3).map(lambda pages: pages * PAGE),
)
def test_every_row_is_in_the_buffer_where_the_plan_says(rows, width, base, place):
    starts = base + np.array(sorted(rows), np.int64) * width
    file = np.random.default_rng(0).integers(0, 256, int(starts[-1]) + width, dtype=np.uint8)
    plan = plan_page_reads(starts, width, PAGE, place)
    assert plan.end <= place + most_bytes(len(rows), width, PAGE)
    assert not (plan.offsets % PAGE).any() and not (plan.n_bytes % PAGE).any()
    assert plan.places[0] == place and plan.end == plan.places[-1] + plan.n_bytes[-1]
    assert (plan.places[1:] == plan.places[:-1] + plan.n_bytes[:-1]).all()
    buffer = np.zeros(plan.end, np.uint8)
    for offset, n_bytes, needed, at in zip(*plan[:4], strict=True):
        part = file[offset : offset + n_bytes]
        assert len(part) >= needed
        buffer[at : at + len(part)] = part
    for start, at, read in zip(starts, plan.row_places, plan.row_read, strict=True):
        assert (buffer[at : at + width] == file[start : start + width]).all()
        last = plan.offsets[read] + plan.needed[read]
        assert plan.offsets[read] <= start and start + width <= last


def test_rows_that_share_a_page_or_touch_are_one_read():
    starts = np.array([0, 10, 70, 500, 620, 1000], np.int64)
    plan = plan_page_reads(starts, 8, PAGE)
    assert plan.offsets.tolist() == [0, 448, 576, 960]
    assert plan.n_bytes.tolist() == [128, 64, 64, 64]


def test_a_long_stretch_is_cut_so_that_it_is_read_at_depth():
    width = 16
    starts = np.arange(40 * PAGES_AT_ONCE * PAGE // width, dtype=np.int64) * width
    plan = plan_page_reads(starts, width, PAGE)
    assert (plan.n_bytes == PAGES_AT_ONCE * PAGE).all()
    assert plan.end == 40 * PAGES_AT_ONCE * PAGE
