"""What ids weigh in a draw, in whole numbers: called from the kernels that draw.

An id's weight and how a draw goes stand in `reference.draw`. Invariants: a weight is 2^40 at most,
so the sum of 2^22 ids has room in 64 bits; sums of whole numbers are exact in any order; where a
logit is NaN weights mean nothing, but are not negative.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .libm import expf

_ONE = tl.constexpr(2.0**40)
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def load_weights(logits, at, n, likeliest, numbers, powers):
    """Return the weights i64 of the ids `at` below n, 0 for others; and their logits."""
    inside = at < n
    found = tl.load(logits + at, mask=inside, other=-_INFINITY)
    largest = tl.load(logits + tl.load(likeliest))
    temperature = tl.load(numbers).to(tl.int32).to(tl.float32, bitcast=True)
    same = found == largest  # two infinite ones have no difference
    gaps = tl.where(same, 0.0, found) - tl.where(same, 0.0, largest)
    gaps = tl.where(gaps == gaps, gaps, -_INFINITY)  # noqa: PLR0124  NaN
    powers_of_two = tl.load(powers + tl.arange(0, 32))
    shares = expf(tl.div_rn(gaps, temperature), powers_of_two)
    return tl.where(inside, (shares * _ONE).to(tl.int64), 0), found


@triton.jit
def share_of(total, share):
    """Return floor(total * share / 2^64) i64 of i64 that stand for unsigned numbers."""
    high = tl.umulhi(total.to(tl.uint64, bitcast=True), share.to(tl.uint64, bitcast=True))
    return high.to(tl.int64, bitcast=True)


@triton.jit
def store_id(out, found, likeliest):
    """Write the id that was found, or what `likeliest` left where a logit is NaN."""
    is_nan = tl.load(likeliest + 1)
    tl.store(out, tl.where(is_nan != 0, tl.load(likeliest), found))
    tl.store(out + 1, is_nan)
