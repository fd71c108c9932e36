"""The C library's expf and log1pf, and the router's score made of them, bit for bit.

Called from other kernels. Each gives the bits of glibc 2.36 on x86-64 with FMA for all 2^32 inputs,
but for the payload of a NaN. How they compute is told in the references of the same names.

Invariant: log1pf, and so softplus_sqrt, rounds after every operation: a kernel that uses them is
launched with enable_fp_fusion=False. expf gives the same bits either way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .reference import expf as exp_reference
from .reference import log1pf as log_reference
from .reference.expf import exp_powers
from .reference.softplus_sqrt import LINEAR_ABOVE

__all__ = ["exp_powers", "expf", "log1pf", "softplus_sqrt"]

_INVERSE = tl.constexpr(exp_reference.INVERSE)
_INVERSE_HIGH = tl.constexpr(exp_reference.INVERSE_HIGH)
_INVERSE_LOW = tl.constexpr(exp_reference.INVERSE_LOW)
_SHIFT = tl.constexpr(exp_reference.SHIFT)
_CUBE = tl.constexpr(exp_reference.CUBE)
_SQUARE = tl.constexpr(exp_reference.SQUARE)
_LINEAR = tl.constexpr(exp_reference.LINEAR)
_LARGEST = tl.constexpr(exp_reference.LARGEST)
_SMALLEST = tl.constexpr(exp_reference.SMALLEST)

_DIRECT_FROM = tl.constexpr(log_reference.DIRECT_FROM)
_DIRECT_TO = tl.constexpr(log_reference.DIRECT_TO)
_CARRY = tl.constexpr(log_reference.CARRY)
_LN_2_HIGH = tl.constexpr(log_reference.LN_2_HIGH)
_LN_2_LOW = tl.constexpr(log_reference.LN_2_LOW)
_S1, _S2, _S3, _S4, _S5, _S6, _S7 = (tl.constexpr(c) for c in log_reference.SERIES)

_LINEAR_ABOVE = tl.constexpr(LINEAR_ABOVE)
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def expf(x, powers):
    """Return e^x for x f32 [n]; powers [32] i64 is what `exp_powers` holds, loaded."""
    wide = tl.minimum(tl.maximum(x, _SMALLEST), _LARGEST).to(tl.float64)
    shifted = wide * _INVERSE + _SHIFT
    k = shifted.to(tl.int64, bitcast=True)
    r = (wide * _INVERSE_HIGH - (shifted - _SHIFT)) + wide * _INVERSE_LOW
    power = tl.gather(powers, (k & 31).to(tl.int32), 0) + (k << 47)
    y = (r * _CUBE + _SQUARE) * (r * r) + (r * _LINEAR + 1.0)
    y = (y * power.to(tl.float64, bitcast=True)).to(tl.float32)
    nan = x != x  # noqa: PLR0124
    return tl.where(nan, x, tl.where(x > _LARGEST, _INFINITY, y))


@triton.jit
def log1pf(x):
    """Return ln(1 + x) for x f32; -inf at -1, NaN below."""
    # where the result is special, what is computed beside it is a plain number's
    special = (x <= -1.0) | (x == _INFINITY) | (x != x)  # noqa: PLR0124
    v = tl.where(special, 0.0, x)
    u = v + 1.0
    words = u.to(tl.int32, bitcast=True)
    k = ((words + _CARRY) >> 23) - 127
    f = (words - (k << 23)).to(tl.float32, bitcast=True) - 1.0
    direct = (v >= _DIRECT_FROM) & (v <= _DIRECT_TO)
    k = tl.where(direct, 0, k)
    f = tl.where(direct, v, f)
    c = tl.div_rn(tl.where(u >= 2.0, 1.0 - (u - v), v - (u - 1.0)), u)
    c = tl.where(k == 0, 0.0, c)
    half_square = (f * 0.5) * f
    s = tl.div_rn(f, f + 2.0)
    z = s * s
    series = ((((z * _S7 + _S6) * z + _S5) * z + _S4) * z + _S3) * z
    series = ((series + _S2) * z + _S1) * z
    power = k.to(tl.float32)
    rest = s * (series + half_square) + (power * _LN_2_LOW + c)
    y = power * _LN_2_HIGH - ((half_square - rest) - f)
    y = tl.where(v == 0.0, v, y)  # a zero keeps its sign
    return tl.where(special, tl.where(x == -1.0, -_INFINITY, tl.where(x > 0.0, x, float("nan"))), y)


@triton.jit
def softplus_sqrt(logits, powers):
    """Return sqrt(softplus(logit)) for logits f32 [n]; powers as for expf."""
    soft = log1pf(expf(logits, powers))
    return tl.sqrt_rn(tl.where(logits > _LINEAR_ABOVE, logits, soft))
