"""Rotary position encoding of rows that a kernel holds."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def turn_tail(x, turns, width, n_turned, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Turn the last `n_turned` of `width` channels of x f32 [ROWS, BLOCK] as adjacent pairs.

    turns    pointer to the position's (cos, sin) f32 pairs, the same for all rows
    returns  [ROWS, BLOCK] f32; the other channels as they are

    Launch with `enable_fp_fusion=False`: the reference rounds both products before it adds them.
    """
    pair = tl.arange(0, BLOCK // 2) - (width - n_turned) // 2
    turned = (pair >= 0) & (pair < n_turned // 2)
    cos = tl.load(turns + 2 * pair, mask=turned, other=1.0)[None, :]
    sin = tl.load(turns + 2 * pair + 1, mask=turned, other=0.0)[None, :]
    even, odd = tl.split(tl.reshape(x, [ROWS, BLOCK // 2, 2]))
    real = tl.where(turned[None, :], even * cos - odd * sin, even)
    imaginary = tl.where(turned[None, :], even * sin + odd * cos, odd)
    return tl.reshape(tl.join(real, imaginary), [ROWS, BLOCK])
