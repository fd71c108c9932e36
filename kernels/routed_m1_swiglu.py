"""What happens between an expert's products: roundings, clamps, the gate and the routing weight."""

from __future__ import annotations

import triton
import triton.language as tl

from .bf16_bits import round_to_bf16


@triton.jit
def rounded(v, BF16: tl.constexpr):
    """Return v rounded to bf16, or as it is."""
    if BF16:
        v = round_to_bf16(v)
    return v


@triton.jit
def gated(gate, up, weight, limit, BF16: tl.constexpr):
    """Return weight * silu(gate) * up, clamped: gate from above, up from both sides."""
    gate = tl.minimum(rounded(gate, BF16), limit)
    up = tl.minimum(tl.maximum(rounded(up, BF16), -limit), limit)
    # exp of a negative number never overflows; the sigmoid of the two signs are complements.
    small = tl.exp(-tl.abs(gate))
    sigmoid = tl.where(gate < 0.0, small, 1.0) / (1.0 + small)
    return rounded(gate * sigmoid * up * weight, BF16)
