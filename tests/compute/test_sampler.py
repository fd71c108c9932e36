from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compute.sampler import Sampling, choose
from protocol.errors import ConfigError, ShardError

LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.25, 0.05], np.float32))


def _shares(sampling: dict[str, float], logits: np.ndarray = LOGITS, n: int = 4000) -> np.ndarray:
    settings_ = Sampling(**sampling)  # type: ignore[arg-type]
    ids = [choose(logits, position, settings_).id for position in range(n)]
    return np.bincount(ids, minlength=len(logits)) / n


def test_temperature_zero_takes_the_largest_and_the_lower_id_of_equals() -> None:
    greedy = Sampling(temperature=0)
    assert choose(LOGITS, 0, greedy).id == 1
    assert choose(np.array([1, 3, 3, 2], np.float32), 9, greedy).id == 1


def test_the_same_seed_position_and_logits_give_the_same_id() -> None:
    sampling = Sampling(seed=7)
    first = [choose(LOGITS, position, sampling).id for position in range(50)]
    backwards = [choose(LOGITS, position, sampling).id for position in reversed(range(50))]
    assert first == backwards[::-1]
    assert first != [choose(LOGITS, position, Sampling(seed=8)).id for position in range(50)]


def test_known_draws_stay_the_same() -> None:
    ids = [choose(LOGITS, position, Sampling(seed=1)).id for position in range(12)]
    assert ids == [1, 1, 3, 2, 1, 1, 3, 3, 3, 0, 3, 3]


def test_shares_follow_the_distribution() -> None:
    assert np.abs(_shares({}) - np.exp(LOGITS)).max() < 0.03


def test_temperature_sharpens() -> None:
    wanted = np.exp(LOGITS / 0.5)
    assert np.abs(_shares({"temperature": 0.5}) - wanted / wanted.sum()).max() < 0.03


def test_filters_keep_the_likeliest() -> None:
    assert set(np.flatnonzero(_shares({"top_k": 2}))) == {1, 3}
    assert set(np.flatnonzero(_shares({"top_p": 0.6}))) == {1, 3}
    assert set(np.flatnonzero(_shares({"top_p": 0.7}))) == {1, 2, 3}
    assert set(np.flatnonzero(_shares({"min_p": 0.3}))) == {1, 2, 3}
    assert set(np.flatnonzero(_shares({"top_p": 1e-9}))) == {1}
    assert set(np.flatnonzero(_shares({"min_p": 1.0}))) == {1}


def test_top_p_acts_on_what_top_k_left() -> None:
    # Of 0.4, 0.25, 0.2 the first two are 0.76, so 0.8 needs the third and 0.75 does not.
    assert set(np.flatnonzero(_shares({"top_k": 3, "top_p": 0.8}))) == {1, 2, 3}
    assert set(np.flatnonzero(_shares({"top_k": 3, "top_p": 0.75}))) == {1, 3}


def test_log_probabilities_are_those_of_the_plain_logits() -> None:
    sampling = Sampling(temperature=0.3, top_k=1, top_logprobs=3)
    choice = choose(LOGITS, 0, sampling, logprobs=True)
    assert choice.id == 1
    assert choice.logprob == pytest.approx(np.log(0.4), abs=1e-6)
    assert [token for token, _ in choice.top] == [1, 3, 2]
    assert [p for _, p in choice.top] == pytest.approx(np.log([0.4, 0.25, 0.2]), abs=1e-6)
    assert choose(LOGITS, 0, sampling).logprob is None


def test_ids_ruled_out_by_minus_infinity_are_never_drawn() -> None:
    logits = np.array([-np.inf, 0, -np.inf, 0], np.float32)
    assert set(np.flatnonzero(_shares({}, logits, 200))) == {1, 3}


def test_a_nan_is_refused_with_its_place() -> None:
    logits = LOGITS.copy()
    logits[3] = np.nan
    with pytest.raises(ShardError, match="position 5: the logit of id 3 is NaN"):
        choose(logits, 5, Sampling())


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.1}, {"min_p": 2}, {"top_k": -1}, {"seed": -1}],
)
def test_settings_out_of_range_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling(**wrong)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.sampled_from([-2.0, 0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=30),
    st.integers(1, 30),
    st.integers(0, 2**64 - 1),
)
def test_a_top_k_draw_is_among_the_k_first_in_order(
    values: list[float], top_k: int, seed: int
) -> None:
    logits = np.array(values, np.float32)
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    assert choose(logits, 3, Sampling(top_k=top_k, seed=seed)).id in order[:top_k]


def test_top_p_over_a_wide_flat_distribution_sorts_as_far_as_it_must() -> None:
    logits = np.zeros(5000, np.float32)
    ids = {choose(logits, position, Sampling(top_p=0.5)).id for position in range(3000)}
    assert max(ids) < 2500
    assert len(ids) > 1500
