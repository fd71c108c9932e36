"""Draws an id from logits on the host, as `kernels.draw` does on a device: the same id, always.

All of it is whole numbers, so nothing depends on an order of sums. Nothing is sorted but values:
the ids that the filters keep are those above a logit, and the first of those equal to it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .id_weights import Float32s, weigh

Flags = NDArray[np.bool_]

_FIRST_TRY = 8192


class DrawNumbers(NamedTuple):
    """What a draw is made with, each in 64 bits; a launch takes them in this order."""

    temperature: int  # the bits of the f32
    top_k: int  # ids that are kept at most, 0: all
    share: int  # of 2^64: the likeliest ids are kept until they weigh this share; 0: all
    least: int  # what a kept id weighs at least, 1 or more
    word: int  # of 64 random bits

    @property
    def is_filtered(self) -> bool:
        """Whether the likeliest ids must be found."""
        return self.top_k != 0 or self.share != 0


def draw(logits: Float32s, numbers: DrawNumbers) -> int:
    """Return the id that the numbers draw from logits [vocab] f32, none of them NaN.

    With the kept ids in ascending order it is the first whose running sum of weights is above
    floor(word * total / 2^64).
    """
    largest = logits.max()
    temperature = np.uint32(numbers.temperature).view(np.float32)
    if numbers.is_filtered:
        ids = np.flatnonzero(_prefix(logits, largest, temperature, numbers))
        weights = weigh(logits[ids], largest, temperature)
    else:
        ids = None
        weights = weigh(logits, largest, temperature)
    if numbers.least > 1:
        weights[weights < numbers.least] = 0
    sums = weights.cumsum(out=weights)
    place = int(sums.searchsorted(_share_of(int(sums[-1]), numbers.word), side="right"))
    return place if ids is None else int(ids[place])


def _prefix(
    logits: Float32s, largest: np.float32, temperature: np.float32, numbers: DrawNumbers
) -> Flags:
    """Which ids top_k and then top_p leave: likeliest first, the lower id first among equals."""
    values = _largest(logits, numbers.top_k or len(logits))
    if numbers.share:
        total = int(weigh(values, largest, temperature).sum())
        wanted = max(1, _share_of(total, numbers.share))
        values = _reaching(values, wanted, largest, temperature)
    least = values.min()
    kept: Flags = logits > least
    equal = np.flatnonzero(logits == least)
    kept[equal[: len(values) - np.count_nonzero(kept)]] = True
    return kept


def _reaching(
    values: Float32s, wanted: int, largest: np.float32, temperature: np.float32
) -> Float32s:
    """The fewest of the values, largest first, that weigh `wanted` together."""
    for n in (_FIRST_TRY, len(values)):  # sorting the few likeliest is enough, as a rule
        tried = np.sort(_largest(values, n))[::-1]
        sums = weigh(tried, largest, temperature)
        sums.cumsum(out=sums)
        if sums[-1] >= wanted:
            break
    return tried[: int(sums.searchsorted(wanted)) + 1]


def _largest(values: Float32s, n: int) -> Float32s:
    """The `n` largest values, in any order; all where there are no more."""
    least = len(values) - n
    return values if least <= 0 else np.partition(values, least)[least:]


def _share_of(total: int, share: int) -> int:
    """Return floor(total * share / 2^64)."""
    return total * share >> 64
