"""What becomes of a group of 32 sums of gate and up, for kernels with explicit layouts."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .reference.q8_1_rows import SMALLEST

_SMALLEST = gl.constexpr(SMALLEST)
_LARGEST = gl.constexpr(3.4028234663852886e38)  # finite f32
# A product that is rounded before it is rounded to a whole number: never fused.
_CODE = gl.constexpr("{ .reg .f32 t; mul.rn.f32 t, $1, $2; cvt.rni.s32.f32 $0, t; }")


@gluon.jit
def bf16_bits(v, BF16: gl.constexpr):
    """Round to bf16 where it is wanted."""
    if BF16:
        bits = v.to(gl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        v = bits.to(gl.float32, bitcast=True)
    return v


@gluon.jit
def or_nan(v, inside):
    """As `routed_m1_swiglu.or_nan`."""
    nan = (v.to(gl.int32, bitcast=True) | 0x7FC00000).to(gl.float32, bitcast=True)
    return gl.where(gl.abs(v) <= _LARGEST, inside, nan)


@gluon.jit
def gated_sums(gate, up, weight, limit, BF16: gl.constexpr):
    """The activation of sums of gate and up, times a weight: as `routed_m1_swiglu.gated`."""
    g, u = bf16_bits(gate, BF16), bf16_bits(up, BF16)
    g = or_nan(g, gl.minimum(g, limit))
    u = or_nan(u, gl.minimum(gl.maximum(u, -limit), limit))
    # exp of a negative number never overflows; the sigmoid of the two signs are complements.
    small = gl.exp(-gl.abs(g))
    sigmoid = gl.where(g < 0.0, small, 1.0) / (1.0 + small)
    return bf16_bits(g * sigmoid * u * weight, BF16)


@gluon.jit
def store_group(v, codes, sides, expert, group, UNITS: gl.constexpr, WARPS: gl.constexpr):
    """Round one group v [32] to q8_1 and store it in its row."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    v = gl.convert_layout(v, line)
    place = gl.arange(0, 32, layout=line)
    # As whole numbers NaN is above all others; a float maximum drops it.
    largest = gl.max(v.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    is_finite = largest < 0x7F800000
    v = gl.where(is_finite, v, 0.0)
    amax = gl.where(is_finite, largest, 0).to(gl.float32, bitcast=True)
    amax = gl.where(amax < _SMALLEST, 0.0, amax)
    spread = gl.where(place >= 0, amax, 0.0)
    scale = gl.div_rn(spread, gl.full([32], 127.0, gl.float32, line)).to(gl.int32, bitcast=True)
    scale = gl.where(is_finite, scale, 0x7FC00000)
    inverse = gl.div_rn(gl.full([32], 127.0, gl.float32, line), gl.where(spread == 0, 1.0, spread))
    inverse = gl.where(spread == 0, 0.0, inverse)
    code = gl.inline_asm_elementwise(
        _CODE, "=r,f,f", [v, inverse], dtype=gl.int32, is_pure=True, pack=1
    )
    unit, quarter = group // 4, group % 4
    vector = (expert * 8 + quarter * 2 + place // 16) * UNITS + unit
    gl.store(codes + vector * 16 + place % 16, code.to(gl.int8))
    lower = gl.sum(gl.where(place < 16, code, 0), 0)
    upper = gl.sum(gl.where(place < 16, 0, code), 0)
    out = sides + (expert * UNITS + unit) * 8 + quarter
    gl.store(out + place * 0, scale)
    gl.store(out + 4, (lower & 0xFFFF) | (upper << 16))
