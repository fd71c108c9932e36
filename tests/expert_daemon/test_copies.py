from __future__ import annotations

from collections import Counter

import pytest

from expert_daemon.copies import HOME, LEAST_SHARE, MIRROR, Copies, CopyRates
from expert_daemon.read_plan import Fragment

MIB = 1 << 20


def measured(home, mirror, n=40):
    """Rates of copies that served `n` parts of 1 MiB at so many bytes a second."""
    rates = CopyRates()
    for _ in range(n):
        for copy, rate in ((HOME, home), (MIRROR, mirror)):
            rates.note(copy, MIB, int(MIB / rate * 1e9))
    return rates


def dealt(rates, n=600):
    return Counter(rates.deal(MIB) for _ in range(n))


def test_before_anything_is_measured_the_copies_take_turns():
    rates = CopyRates()
    assert [rates.deal(MIB) for _ in range(6)] == [HOME, MIRROR] * 3
    rates.note(HOME, MIB, 1)
    assert rates.shares() == (0.5, 0.5)


def test_each_copy_serves_in_proportion_to_its_rate():
    rates = measured(2e9, 1e9)
    assert rates.rates() == pytest.approx((2e9, 1e9), rel=1e-3)
    assert dealt(rates)[HOME] == pytest.approx(400, abs=2)


def test_a_hopeless_copy_is_still_tried_now_and_then():
    assert dealt(measured(1.0, 1e9, n=9))[HOME] == pytest.approx(600 * LEAST_SHARE, abs=2)


def test_what_was_read_lately_counts_most():
    rates = measured(2e9, 1e9)
    for _ in range(200):
        rates.note(HOME, MIB, int(MIB / 0.5e9 * 1e9))
    assert rates.rates()[HOME] == pytest.approx(0.5e9, rel=0.02)
    assert dealt(rates)[HOME] == pytest.approx(200, abs=5)


def test_a_copy_that_fails_at_once_is_not_held_for_fast():
    rates = measured(1e9, 1e9)
    for _ in range(200):
        rates.note_failed(HOME, MIB, 10)
    assert dealt(rates)[HOME] == pytest.approx(600 * LEAST_SHARE, abs=2)
    dead = CopyRates()
    for _ in range(20):
        dead.note_failed(HOME, MIB, 10)
        dead.note(MIRROR, MIB, MIB)
    assert dead.shares()[HOME] == LEAST_SHARE


def copies_of(mirrored=True):
    return Copies(
        lambda key: [Fragment(0, key[1] * MIB, MIB, 0)],
        lambda key: [Fragment(1, key[1] * MIB, MIB, 0)] if mirrored else [],
    )


def test_a_key_without_a_mirror_is_read_at_home():
    copies = copies_of(mirrored=False)
    assert [copies.order((0, 1), MIB) for _ in range(3)] == [[HOME]] * 3
    assert copies.order((0, 1), MIB, last=HOME) == [HOME]


def test_a_bad_copy_is_not_tried_until_it_is_trusted_again():
    copies = copies_of()
    assert copies.distrust((0, 1), HOME)
    assert [copies.order((0, 1), MIB) for _ in range(3)] == [[MIRROR]] * 3
    assert copies.order((0, 2), MIB) == [HOME, MIRROR]
    assert not copies.distrust((0, 1), MIRROR)
    assert copies.good((0, 1)) == []
    copies.trust((0, 1))
    assert copies.good((0, 1)) == [HOME, MIRROR]


def test_a_copy_that_failed_is_tried_last_until_the_other_one_fails():
    copies = copies_of()
    copies.note_failed((0, 1), HOME)
    assert [copies.order((0, 1), MIB) for _ in range(3)] == [[MIRROR, HOME]] * 3
    copies.note_failed((0, 1), MIRROR)
    assert copies.order((0, 1), MIB) == [HOME, MIRROR]


def test_a_second_read_begins_with_the_other_copy():
    copies = copies_of()
    assert copies.order((0, 1), MIB, last=HOME) == [MIRROR, HOME]
    assert copies.order((0, 1), MIB, last=MIRROR) == [HOME, MIRROR]
