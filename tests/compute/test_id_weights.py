"""What ids weigh on the host: the reference's bits, in order, and close to the softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compute.id_weights import ONE, expf, weigh
from kernels.reference import expf as reference

LEAST_WEIGHED = 0xC1E00000  # the bits of -28, below which nothing weighs anything


def same_bits(x: np.ndarray) -> bool:
    wanted = reference.expf(torch.from_numpy(x)).numpy()
    return bool((expf(x).view(np.int32) == wanted.view(np.int32)).all())


def test_powers_have_the_bits_of_the_reference() -> None:
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, 2**18, dtype=np.uint64).astype(np.uint32).view(np.float32)
    assert same_bits(bits[~np.isnan(bits)])
    assert same_bits(-rng.exponential(8, 2**18).astype(np.float32))
    edges = [0, -0.0, 1, -1, 88.72283, 88.72284, -28, -103.9, -104, -110, np.inf, -np.inf]
    assert same_bits(np.array(edges, np.float32))


def test_weights_follow_the_softmax_and_the_largest_weighs_one() -> None:
    logits = np.random.default_rng(2).normal(0, 4, 50_000).astype(np.float32)
    weights = weigh(logits, logits.max(), np.float32(0.7))
    wanted = np.exp((logits.astype(np.float64) - logits.max()) / np.float32(0.7))
    assert weights.max() == weights[logits.argmax()] == ONE
    assert (np.abs(weights / ONE - wanted) <= wanted * 3e-6 + 1 / ONE).all()


def test_infinite_logits_weigh_nothing_or_as_much_as_their_like() -> None:
    low, high = np.float32(-np.inf), np.float32(np.inf)
    one = np.float32(1)
    assert weigh(np.array([low, 3, low], np.float32), np.float32(3), one).tolist() == [0, ONE, 0]
    assert weigh(np.array([high, 3, low, high], np.float32), high, one).tolist() == [ONE, 0, 0, ONE]
    assert weigh(np.array([low, low], np.float32), low, one).tolist() == [ONE, ONE]


def falls(first: int, end: int) -> bool:
    """Whether the power of what has the bits `first` to `end` never grows."""
    return bool((np.diff(expf(np.arange(first, end, dtype=np.uint32).view(np.float32))) <= 0).all())


def test_a_lower_logit_never_weighs_more() -> None:
    for first in np.random.default_rng(3).integers(0x80000000, LEAST_WEIGHED, 40).tolist():
        assert falls(first, first + 4096)


@pytest.mark.accept
def test_no_lower_logit_at_all_weighs_more() -> None:
    step = 1 << 18
    for first in range(0x80000000, LEAST_WEIGHED, step):
        assert falls(first, first + step + 1)
