"""What happens between an expert's products: roundings, clamps, the gate and the routing weight."""

from __future__ import annotations

import triton
import triton.language as tl

from .bf16_bits import round_to_bf16

_LARGEST = tl.constexpr(3.4028234663852886e38)  # finite f32


@triton.jit
def rounded(v, BF16: tl.constexpr):
    """Return v rounded to bf16, or as it is."""
    if BF16:
        v = round_to_bf16(v)
    return v


@triton.jit
def or_nan(v, inside):
    """Return `inside` where v is a finite number, else NaN.

    A sum that is none comes of a scale or an input that nobody meant: clamped it would be a number.
    """
    nan = (v.to(tl.int32, bitcast=True) | 0x7FC00000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(v) <= _LARGEST, inside, nan)


@triton.jit
def gated(gate, up, weight, limit, BF16: tl.constexpr):
    """Return weight * silu(gate) * up, clamped: gate from above, up from both sides.

    NaN where gate or up is no finite number.
    """
    gate, up = rounded(gate, BF16), rounded(up, BF16)
    gate = or_nan(gate, tl.minimum(gate, limit))
    up = or_nan(up, tl.minimum(tl.maximum(up, -limit), limit))
    # exp of a negative number never overflows; the sigmoid of the two signs are complements.
    small = tl.exp(-tl.abs(gate))
    sigmoid = tl.where(gate < 0.0, small, 1.0) / (1.0 + small)
    return rounded(gate * sigmoid * up * weight, BF16)
