"""The logarithm of 1 + x, with the bits of one C library."""

from __future__ import annotations

import torch
from torch import Tensor

# Within these, x is small enough to be its own argument: about sqrt(1/2) - 1 and sqrt(2) - 1.
DIRECT_FROM = float.fromhex("-0x1.2bec3ep-2")
DIRECT_TO = float.fromhex("0x1.a827acp-2")
CARRY = 0x800000 - 0x3504F7  # brings a mantissa from about sqrt(2) on to the next power of two
LN_2_HIGH = float.fromhex("0x1.62e3p-1")
LN_2_LOW = float.fromhex("0x1.2fefa2p-17")
SERIES = tuple(
    float.fromhex(c)
    for c in (
        "0x1.555556p-1", "0x1.99999ap-2", "0x1.24924ap-2", "0x1.c71c52p-3",
        "0x1.74664ap-3", "0x1.39a09ep-3", "0x1.2f112ep-3",
    )
)  # fmt: skip


def log1pf(x: Tensor) -> Tensor:
    """Return ln(1 + x), bit-equal to glibc 2.36's log1pf on x86-64, but for the payload of a NaN.

    x        f32, any shape
    returns  f32, the same shape; -inf at -1, NaN below

    1 + x = 2^k * (1 + f) with 1 + f between about sqrt(1/2) and sqrt(2), and c what rounding 1 + x
    lost, over 1 + x; ln(1 + f) = f - (f^2 / 2 - s * (f^2 / 2 + R)), s = f / (2 + f), R a series in
    s^2. Every operation is f32 and rounds by itself: the library has one variant of this function,
    unfused. It takes short cuts for large and tiny x and tiny f, which change no result.
    """
    k, f, c = _reduced(x)
    half_square = (f * 0.5).mul_(f)
    s = f / (f + 2.0)
    z = s * s
    series = z * SERIES[6]
    for factor in SERIES[5::-1]:
        series.add_(factor).mul_(z)
    rest = series.add_(half_square).mul_(s).add_(c.add_(k * LN_2_LOW))
    y = k.mul_(LN_2_HIGH).sub_(half_square.sub_(rest).sub_(f))
    y.copysign_(x)  # a zero's
    y.masked_fill_(x <= -1.0, torch.nan).masked_fill_(x == -1.0, -torch.inf)
    return y.masked_fill_(x == torch.inf, torch.inf)


def _reduced(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return k, f and c, f32 each."""
    u = x + 1.0
    lost = torch.where(u >= 2.0, 1.0 - (u - x), x - (u - 1.0))
    words = u.view(torch.int32)
    k = ((words + CARRY) >> 23).sub_(127)
    f = (words - (k << 23)).view(torch.float32).sub_(1.0)
    direct = x.clamp(DIRECT_FROM, DIRECT_TO) == x
    k.masked_fill_(direct, 0)
    c = lost.div_(u).masked_fill_(k == 0, 0.0)
    return k.float(), torch.where(direct, x, f), c
