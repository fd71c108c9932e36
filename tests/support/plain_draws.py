"""A draw as its definition reads, in whole numbers; and logits that are hard to draw from."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from hypothesis import strategies as st

from compute.host_draw import DrawNumbers
from compute.sampler import Sampling, draw_numbers
from kernels.reference.expf import expf

Row = np.ndarray
SIZES = (1, 5, 1023, 1024, 1025, 3000)
KINDS = ("normal", "wide", "narrow", "tied", "banned", "equal", "one", "nothing", "far", "zeros")
FILTERS = (
    Sampling(),
    Sampling(temperature=0.3, min_p=0.02),
    Sampling(temperature=2, top_p=0.9),
    Sampling(top_p=1e-9),
    Sampling(temperature=1e-30, top_p=0.5),
    Sampling(temperature=100, top_p=1 - 2**-53),
    Sampling(top_k=1),
    Sampling(temperature=0.7, top_k=40),
    Sampling(temperature=0.9, top_k=20, top_p=0.8, min_p=0.01),
    Sampling(temperature=5, top_k=1500, top_p=0.99),
    Sampling(top_k=2**31, min_p=1),
)


def weights_of(logits: Row, numbers: DrawNumbers) -> list[int]:
    """Return what each id weighs."""
    temperature = np.uint32(numbers.temperature).view(np.float32)
    with np.errstate(all="ignore"):
        gaps = (logits - logits.max()) / temperature
    gaps[logits == logits.max()] = 0
    return [int(float(share) * 2**40) for share in expf(torch.from_numpy(gaps))]


def plain_draw(logits: Row, numbers: DrawNumbers) -> int:
    """Return the id that is drawn."""
    weights, logit = weights_of(logits, numbers), logits.tolist()
    order = sorted(range(len(logit)), key=lambda token: (-logit[token], token))
    order = order[: numbers.top_k or None]
    if numbers.share:
        wanted = max(1, sum(weights[token] for token in order) * numbers.share // 2**64)
        n, reached = 0, 0
        while reached < wanted:
            reached += weights[order[n]]
            n += 1
        order = order[:n]
    kept = sorted(token for token in order if weights[token] >= numbers.least)
    rest = sum(weights[token] for token in kept) * numbers.word // 2**64
    for token in kept:
        rest -= weights[token]
        if rest < 0:
            return token
    raise AssertionError("a random word is below 2^64")


def hard_row(kind: str, n: int, seed: int = 0) -> Row:
    """Return logits [n] f32 of a kind."""
    rng = np.random.default_rng([seed, n, KINDS.index(kind)])
    row = rng.normal(0, {"wide": 30, "narrow": 1e-4}.get(kind, 3), n).astype(np.float32)
    if kind == "tied":
        row = np.round(row)
    elif kind == "banned":
        row[rng.permutation(n)[: n - n // 4 - 1]] = -np.inf
    elif kind == "equal":
        row[:] = row[0]
    elif kind == "one":
        row[n // 3] = 50
    elif kind == "nothing":
        row[:] = -np.inf
    elif kind == "far":
        row[0], row[n // 2], row[-1] = -3.4e38, 3.4e38, np.inf
    elif kind == "zeros":
        row = np.where(row > 0, np.float32(0), -np.float32(0))
        row[n // 2 :] = -1
    return row


def hard_cases(n: int) -> Iterator[tuple[Row, DrawNumbers]]:
    """Yield every kind of logits with every filter."""
    for number, kind in enumerate(KINDS):
        row = hard_row(kind, n)
        for place, sampling in enumerate(FILTERS):
            yield row, draw_numbers(sampling, 100 * number + place)


_FLOATS = st.floats(width=32, allow_nan=False)
_FEW = st.sampled_from([-2.0, -0.0, 0.0, 0.5, 1.0, 3.0, float("-inf")])
# Any logits, few kinds of them too, and what is drawn from them with.
ANY_DRAW = st.builds(
    lambda values, *wishes: (np.array(values, np.float32), draw_numbers(Sampling(*wishes), 3)),
    st.one_of(st.lists(_FLOATS, min_size=1, max_size=20), st.lists(_FEW, min_size=1, max_size=40)),
    st.floats(0, 100, exclude_min=True),
    st.floats(1e-9, 1),
    st.integers(0, 45),
    st.one_of(st.just(0.0), st.floats(0, 1)),
    st.integers(0, 2**64 - 1),
)
