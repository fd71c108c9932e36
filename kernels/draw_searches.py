"""Searches over gathered ids: where the kept ones end, and what they weigh. Called from a kernel.

Gathered are ids in ascending order, their keys, which compare as the logits do, and weights. A cut
is a key and an id: kept is what has a higher key, or that key and a lower id. One program takes the
ids in chunks, as many as there are, and every sum is of whole numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

ALL = tl.constexpr(-(1 << 32))  # a cut's key that keeps all


@triton.jit
def kept_weights(
    ids, keys, weights, start, n_here, key, end, least, COUNTS: tl.constexpr, CHUNK: tl.constexpr
):
    """Return the weights i64 [CHUNK] of a chunk's kept ids, 1 each if COUNTS, and 0 for others."""
    at = start + tl.arange(0, CHUNK)
    inside = at < n_here
    weight = tl.load(weights + at, mask=inside, other=0)
    own = tl.load(keys + at, mask=inside, other=0).to(tl.int64)
    kept = (own > key) | ((own == key) & (tl.load(ids + at, mask=inside, other=0) < end))
    kept = kept & inside & (weight >= least)
    return kept.to(tl.int64) if COUNTS else tl.where(kept, weight, 0)


@triton.jit
def sum_of(ids, keys, weights, n_here, key, end, least, COUNTS: tl.constexpr, CHUNK: tl.constexpr):
    """Return what the kept ids of at least that weight weigh together, or how many they are."""
    found = tl.zeros([CHUNK], tl.int64)
    for start in range(0, n_here, CHUNK):
        found += kept_weights(ids, keys, weights, start, n_here, key, end, least, COUNTS, CHUNK)
    return tl.sum(found, 0)


@triton.jit
def _key_range(keys, n_here, CHUNK: tl.constexpr):
    low = tl.full([CHUNK], 0x7FFFFFFF, tl.int32)
    high = tl.full([CHUNK], -0x80000000, tl.int32)
    for start in range(0, n_here, CHUNK):
        at = start + tl.arange(0, CHUNK)
        inside = at < n_here
        low = tl.minimum(low, tl.load(keys + at, mask=inside, other=0x7FFFFFFF))
        high = tl.maximum(high, tl.load(keys + at, mask=inside, other=-0x80000000))
    return tl.min(low, 0).to(tl.int64), tl.max(high, 0).to(tl.int64)


@triton.jit
def cut(ids, keys, weights, n_here, n, goal, COUNTS: tl.constexpr, CHUNK: tl.constexpr):
    """Return the cut (key, end) of the fewest likeliest ids, all below n, that reach the goal.

    All together reach it. Likeliest first, of equals the lower id first.
    """
    low, high = _key_range(keys, n_here, CHUNK)
    while low < high:  # the highest key with which the goal is reached
        middle = low + ((high - low + 1) >> 1)
        reached = sum_of(ids, keys, weights, n_here, middle - 1, 0, 0, COUNTS, CHUNK)
        low = tl.where(reached >= goal, middle, low)
        high = tl.where(reached >= goal, high, middle - 1)
    n_equal = sum_of(ids, keys, weights, n_here, low, n, 0, True, CHUNK)
    n_equal -= sum_of(ids, keys, weights, n_here, low, 0, 0, True, CHUNK)
    short, end = tl.where(n_equal > 1, 0, n - 1), n
    while end - short > 1:  # the lowest end with which the goal is reached
        middle = short + ((end - short) >> 1)
        reached = sum_of(ids, keys, weights, n_here, low, middle, 0, COUNTS, CHUNK)
        short = tl.where(reached >= goal, short, middle)
        end = tl.where(reached >= goal, middle, end)
    return low, end
