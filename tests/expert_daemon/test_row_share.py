"""Readers share their part of the row ring, whatever one of them keeps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from expert_daemon.row_job import RowJob
from expert_daemon.row_ring import RowRing
from expert_daemon.row_share import RowShare

MOST = 20
FIRST = 20
KEEPER = 1  # never gives anything back
SESSIONS = st.integers(1, 4)
ACTIONS = st.tuples(st.booleans(), SESSIONS, st.integers(1, MOST))


def job_of(session, n_rows):
    return RowJob(session, 1, [], n_rows, is_engines=False)


@given(st.integers(60, 90), st.lists(ACTIONS, max_size=80))
def test_nobody_waits_for_ever_for_what_one_session_keeps(ring_rows, actions):
    ring = RowRing(ring_rows)
    share = RowShare(ring, FIRST, MOST)
    waiting: list[RowJob] = []
    held: list[RowJob] = []

    def take():
        while (job := share.take_next()) is not None:
            waiting.remove(job)
            assert job.position >= FIRST
            assert all(
                job.position + job.n_rows <= one.position
                or one.position + one.n_rows <= job.position
                for one in held
            )
            held.append(job)
            mine = [one for one in held if one.session == job.session]
            first = min(one.position for one in mine)
            last = max(one.position + one.n_rows for one in mine)
            last_area = (ring_rows - FIRST) // MOST - 1
            area = min((first - FIRST) // MOST, last_area)
            assert last <= (ring_rows if area == last_area else FIRST + (area + 1) * MOST)

    def give(job):
        held.remove(job)
        share.give(job)
        take()

    for gives, session, n_rows in actions:
        mine = [one for one in held if one.session == session != KEEPER]
        left = [one for one in waiting if one.session == session]
        if gives and mine:
            give(mine[n_rows % len(mine)])
        elif gives and left and n_rows % 2:
            waiting.remove(left[0])
            share.leave(left[0])
            take()
        else:
            waiting.append(job_of(session, n_rows))
            share.wait(waiting[-1])
            take()
    while honest := [one for one in held if one.session != KEEPER]:
        give(honest[0])
    assert all(one.session == KEEPER for one in waiting)
    for one in list(held):
        give(one)
    while held:
        give(held[0])
    assert waiting == []
    assert ring.n_free == ring_rows


def test_the_session_that_holds_least_is_next_then_the_one_that_waits_longest():
    ring = RowRing(FIRST + 2 * MOST)
    share = RowShare(ring, FIRST, MOST)
    jobs = [job_of(1, 8), job_of(2, MOST), job_of(1, 12), job_of(3, 6), job_of(4, 7)]
    for job in jobs:
        share.wait(job)
    assert [share.take_next() for _ in range(3)] == [jobs[0], jobs[1], jobs[3]]
    assert share.take_next() is None  # 4 waits: what 1 wants would fit, but 1 holds more
    share.give(jobs[3])
    assert share.take_next() is jobs[4]


def test_who_waits_for_itself_keeps_nobody():
    ring = RowRing(FIRST + 2 * MOST)
    share = RowShare(ring, FIRST, MOST)
    jobs = [job_of(1, 1), job_of(1, MOST), job_of(2, 5), job_of(2, 5)]
    for job in jobs:
        share.wait(job)
    assert [share.take_next() for _ in range(4)] == [jobs[0], jobs[2], jobs[3], None]
