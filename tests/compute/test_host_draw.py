"""Draws on the host: what the definition says, for any logits and filters."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from compute.host_draw import DrawNumbers, draw
from compute.sampler import Sampling, draw_numbers
from tests.support.plain_draws import (
    ANY_DRAW,
    SIZES,
    Row,
    hard_cases,
    hard_row,
    plain_draw,
    weights_of,
)


@pytest.mark.parametrize("n", SIZES)
def test_hard_logits_are_drawn_as_the_definition_says(n: int) -> None:
    for row, numbers in hard_cases(n):
        assert draw(row, numbers) == plain_draw(row, numbers), numbers


def test_more_ids_than_are_sorted_at_first() -> None:
    row = hard_row("normal", 20_000)
    for sampling in (Sampling(temperature=9, top_p=0.95), Sampling(temperature=9, top_k=12_000)):
        numbers = draw_numbers(sampling, 7)
        assert draw(row, numbers) == plain_draw(row, numbers)


@settings(deadline=None, max_examples=300)
@given(ANY_DRAW)
def test_any_draw_is_the_definitions(
    case: tuple[Row, DrawNumbers],
) -> None:
    row, numbers = case
    assert draw(row, numbers) == plain_draw(row, numbers)


def test_each_id_has_just_the_words_that_its_weight_gives_it() -> None:
    row = np.array([0.3, -1, 2, 2, -40, 0], np.float32)
    numbers = draw_numbers(Sampling(), 0)
    weights = weights_of(row, numbers)
    total, below = sum(weights), 0
    assert weights[4] == 0
    for token, weight in enumerate(weights):
        first = -(-below * 2**64 // total)  # the lowest word whose point is not below
        below += weight
        last = -(-below * 2**64 // total) - 1
        if weight:
            assert draw(row, numbers._replace(word=first)) == token
            assert draw(row, numbers._replace(word=last)) == token


def test_a_share_of_next_to_nothing_keeps_one_id() -> None:
    row = np.zeros(9, np.float32)
    assert draw(row, DrawNumbers(0x3F800000, 0, 1, 1, 2**64 - 1)) == 0


def test_numbers_are_the_settings_in_whole_numbers() -> None:
    numbers = draw_numbers(Sampling(temperature=1, top_p=0.5, top_k=7, min_p=0.25, seed=1), 0)
    assert numbers[:4] == (0x3F800000, 7, 2**63, 2**38)
    assert draw_numbers(Sampling(), 0)[1:4] == (0, 0, 1)
    assert draw_numbers(Sampling(top_p=1 - 2**-53), 0).share == 2**64 - 2**11
    assert draw_numbers(Sampling(temperature=5e-324), 0).temperature == (127 - 64) << 23


def test_words_fill_their_64_bits_and_belong_to_seed_and_position() -> None:
    words = [draw_numbers(Sampling(seed=5), position).word for position in range(64)]
    assert len(set(words)) == 64
    assert all(0 <= word < 2**64 for word in words)
    assert {word >> bit & 1 for word in words for bit in (0, 63)} == {0, 1}
    assert words[9] == draw_numbers(Sampling(seed=5, top_k=3, temperature=2), 9).word
    assert words != [draw_numbers(Sampling(seed=6), position).word for position in range(64)]


def test_only_top_k_and_top_p_need_the_likeliest() -> None:
    assert not DrawNumbers(1, 0, 0, 99, 1).is_filtered
    assert DrawNumbers(1, 1, 0, 1, 1).is_filtered
    assert DrawNumbers(1, 0, 1, 1, 1).is_filtered
