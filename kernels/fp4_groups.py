"""Values rounded to fp4 in groups, as functions that kernels call on what they hold.

Invariants: bits equal those of `reference.round_fp4_index` and `reference.round_fp4_latent`; a
group with an infinity or NaN keeps no finite value that the reference would not.
Source: model specification, section 2.2, ROUND_FP4_IDX and ROUND_FP4_KV.
"""

from __future__ import annotations

import triton
import triton.language as tl

_INDEX_FLOOR_BITS = tl.constexpr(0x01C00000)  # 6 * 2^-126 as f32
_LATENT_FLOOR_BITS = tl.constexpr(0x3C400000)  # 6 * 2^-9 as f32
_RECIPROCAL = tl.constexpr(0.1666666716337204)  # 1 / 6 as f32, part of the definition


@triton.jit
def _largest(v, FLOOR_BITS: tl.constexpr):
    # As whole numbers NaN is above all others: it reaches the scale, as a float maximum drops it.
    bits = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(bits, len(v.shape) - 1, keep_dims=True)
    return tl.maximum(largest, FLOOR_BITS).to(tl.float32, bitcast=True)


@triton.jit
def _to_grid(v, MOST: tl.constexpr, LEAST_BINADE: tl.constexpr, MAGIC: tl.constexpr):
    # Added and taken away again, MAGIC binades leave the format's mantissa bits below the binade.
    bits = v.to(tl.int32, bitcast=True)
    is_number = (bits & 0x7FFFFFFF) <= 0x7F800000
    clamped = tl.where(is_number, tl.minimum(tl.maximum(v, -MOST), MOST), v)
    binade = (clamped.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    magic = tl.maximum(binade, LEAST_BINADE) * MAGIC
    code = ((clamped + magic) - magic).to(tl.int32, bitcast=True)
    code = (code & 0x7FFFFFFF) | (bits & -2147483648)  # zero keeps its sign
    return code.to(tl.float32, bitcast=True)


@triton.jit
def round_groups_to_fp4_index(v):
    """Return v f32 [..., 32] on the E2M1 grid of its group's power-of-two scale, in f32."""
    amax = _largest(v, _INDEX_FLOOR_BITS)
    step = (amax * _RECIPROCAL).to(tl.int32, bitcast=True)
    scale = ((step + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return _to_grid(v * tl.div_rn(1.0, scale), 6.0, 1.0, 6291456.0) * scale


@triton.jit
def round_groups_to_fp4_latent(v):
    """Return v f32 [..., 16] on the E2M1 grid of its group's E4M3 scale, in f32."""
    sixth = tl.div_rn(_largest(v, _LATENT_FLOOR_BITS), 6.0)
    scale = _to_grid(sixth, 448.0, 0.015625, 1572864.0)
    return _to_grid(tl.div_rn(v, tl.broadcast_to(scale, v.shape)), 6.0, 1.0, 6291456.0) * scale
