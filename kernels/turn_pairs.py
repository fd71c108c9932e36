"""Rotary turns of a tile's last channels, for the kernels that rotate what they read or write."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def turn_pairs(v, turns, start, FIRST: tl.constexpr, TURNED: tl.constexpr, INVERSE: tl.constexpr):
    """Return v f32 [H, C] with its adjacent pairs of channels turned as `reference.rotate` does.

    v holds the channels start .. start + C - 1 of a row, start even; those from FIRST (even) to
    FIRST + TURNED - 1 are turned, the others stay. turns points to one position's (cos, sin) pairs.
    Products are fused in one fixed way, so that kernels agree on every bit.
    """
    pair = (start - FIRST) // 2 + tl.arange(0, v.shape[1] // 2)
    turned = (pair >= 0) & (pair < TURNED // 2)
    cosine = tl.load(turns + 2 * pair, mask=turned, other=1.0)[None, :]
    sine = tl.load(turns + 2 * pair + 1, mask=turned, other=0.0)[None, :]
    if INVERSE:
        sine = -sine
    even, odd = tl.split(tl.reshape(v, [v.shape[0], v.shape[1] // 2, 2]))
    real = tl.fma(even, cosine, -(odd * sine))
    imaginary = tl.fma(even, sine, odd * cosine)
    real = tl.where(turned[None, :], real, even)
    imaginary = tl.where(turned[None, :], imaginary, odd)
    return tl.reshape(tl.join(real, imaginary), [v.shape[0], v.shape[1]])
