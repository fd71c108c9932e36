"""What ids weigh in a draw, in whole numbers, by the host: the same on every machine.

An id weighs floor(2^40 * e^((logit - largest) / T)). The difference and the quotient are rounded to
f32, e^x has the bits of `kernels.reference.expf`, and sums of whole numbers are exact in any order.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

ONE = 2**40  # what the likeliest id weighs
_BLOCK = 16384  # values at a time: what is made of them stays in the processor's cache

Float32s = NDArray[np.float32]
Weights = NDArray[np.int64]


def weigh(logits: Float32s, largest: np.float32, temperature: np.float32) -> Weights:
    """Return the weights [n] i64 of logits [n] f32, none NaN, of which none is above `largest`.

    Those that equal `largest` weigh 2^40, infinite ones too; -inf weighs 0 beside any other.
    """
    found = np.empty(len(logits), np.int64)
    for start in range(0, len(logits), _BLOCK):
        part = logits[start : start + _BLOCK]
        with np.errstate(invalid="ignore", over="ignore"):  # infinite ones among themselves
            gaps = part - largest
            gaps[part == largest] = 0
            gaps /= temperature
        found[start : start + _BLOCK] = expf(gaps) * np.float32(ONE)
    return found


def expf(x: Float32s) -> Float32s:
    """Return e^x [n] f32 for x [n] f32, none NaN; bits equal `kernels.reference.expf`.

    The same operations in the same order, by numpy: torch takes twice as long, and its threads may
    wait for each other.
    """
    from kernels.reference import expf as port  # noqa: PLC0415  torch: flags are read without it

    wide = x.clip(port.SMALLEST, port.LARGEST).astype(np.float64)
    shifted = wide * port.INVERSE
    shifted += port.SHIFT
    k = shifted.view(np.int64)
    r = wide * port.INVERSE_HIGH
    r -= shifted - port.SHIFT
    wide *= port.INVERSE_LOW
    r += wide
    power = _powers().take(k & 31)
    power += k << 47
    y = r * port.CUBE
    y += port.SQUARE
    y *= r * r
    r *= port.LINEAR
    r += 1.0
    y += r
    y *= power.view(np.float64)
    found = y.astype(np.float32)
    found[x > np.float32(port.LARGEST)] = np.inf
    return found


@cache
def _powers() -> NDArray[np.int64]:
    """Return the port's table."""
    import torch  # noqa: PLC0415  as above

    from kernels.reference.expf import exp_powers  # noqa: PLC0415  as above

    return exp_powers(torch.device("cpu")).numpy()
