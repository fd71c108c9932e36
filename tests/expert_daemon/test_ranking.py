"""The lowest residents, however scores move."""

from __future__ import annotations

import numpy as np

from expert_daemon.ranking import FRONT, Ranking


def filled(scores):
    ranking = Ranking(len(scores))
    for key, score in enumerate(scores):
        ranking.add(key, score)
    return ranking


def test_equal_scores_go_by_last_use():
    ranking = filled([1.0, 1.0, 1.0])
    ranking.use(np.array([0]), np.array([1.0]))
    assert ranking.lowest(3, ()) == [1, 2, 0]


def test_many_equal_scores_go_by_last_use_beyond_the_front():
    n = 5 * FRONT
    ranking = filled([1.0] * n)
    order = np.random.default_rng(0).permutation(n)
    ranking.use(order, np.ones(n))
    assert ranking.lowest(n, ()) == order.tolist()


def test_the_excluded_are_passed_over_and_stay():
    ranking = filled([1.0, 2.0, 3.0])
    assert ranking.lowest(1, {0}) == [1]
    assert ranking.lowest(1, ()) == [0]


def test_choosing_changes_nothing():
    ranking = filled(list(range(3 * FRONT)))
    assert ranking.lowest(2 * FRONT, ()) == ranking.lowest(2 * FRONT, ())


def test_a_score_that_falls_below_the_front_is_seen():
    ranking = filled([float(key) for key in range(4 * FRONT)])
    ranking.lowest(1, ())
    ranking.use(np.array([4 * FRONT - 1]), np.array([-1.0]))
    assert ranking.lowest(2, ()) == [4 * FRONT - 1, 0]


def test_the_front_stays_small_however_often_a_low_score_changes():
    ranking = filled([0.0, 1.0])
    ranking.lowest(1, ())
    for n in range(20 * FRONT):
        ranking.use(np.array([0]), np.array([0.5 + n % 7]))
    assert len(ranking._front) <= 4 * FRONT
    assert ranking.lowest(2, ()) == [1, 0] if ranking.score(0) > 1 else [0, 1]


def test_a_key_that_leaves_and_returns_at_the_mark_is_not_lost():
    ranking = filled([1.0] * (FRONT + 5))
    assert ranking.lowest(FRONT, ())[-1] == FRONT - 1
    ranking.remove(FRONT - 1)
    assert FRONT - 1 not in ranking.lowest(FRONT + 4, ())
    ranking = filled([1.0] * (FRONT + 5))
    ranking.lowest(FRONT, ())
    ranking.remove(FRONT - 1)
    ranking.lowest(FRONT - 1, {0})
    ranking.add(FRONT - 1, 1.0)
    assert ranking.lowest(FRONT, ())[-1] == FRONT - 1


def test_a_removed_key_may_come_back_with_its_old_tick():
    ranking = filled([1.0, 1.0, 1.0])
    ranking.lowest(3, ())
    ranking.remove(0)
    assert ranking.lowest(3, ()) == [1, 2]
    ranking.add(0, 1.0)
    assert ranking.lowest(3, ()) == [0, 1, 2]
    assert ranking.lowest(1, {0, 1, 2}) == []
