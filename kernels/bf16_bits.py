"""Rounding to bf16 on the bits, since Triton's interpreter truncates where a GPU rounds."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def round_to_bf16(v):
    """Return v f32 rounded to the nearest bf16, ties to even.

    Infinities and NaN stay what they are. The result is f32: storing it as bf16 then loses nothing,
    cast or truncation.
    """
    bits = v.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(finite, rounded, bits).to(tl.float32, bitcast=True)
