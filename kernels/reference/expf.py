"""e to the power of x, with the bits of one C library."""

from __future__ import annotations

from decimal import Decimal, localcontext
from functools import lru_cache

import torch
from torch import Tensor

# Of x * 32 / ln 2, the factor's upper 24 bits apart: a product with 24 bits is exact in f64.
INVERSE = float.fromhex("0x1.71547652b82fep+5")
INVERSE_HIGH = float.fromhex("0x1.715476p+5")
INVERSE_LOW = INVERSE - INVERSE_HIGH
SHIFT = float.fromhex("0x1.8p+52")  # adding it rounds to an integer, in the low bits
CUBE = float.fromhex("0x1.c6af84b912394p-20")
SQUARE = float.fromhex("0x1.ebfce50fac4f3p-13")
LINEAR = float.fromhex("0x1.62e42ff0c52d6p-6")
LARGEST = float.fromhex("0x1.62e42ep+6")  # above, the result is infinite
SMALLEST = -110.0  # below -104 the result is zero; clamping keeps the exponent's bits in range


def expf(x: Tensor) -> Tensor:
    """Return e^x, bit-equal to glibc 2.36's expf on x86-64 with FMA, but for the payload of a NaN.

    x        f32, any shape
    returns  f32, the same shape

    x * 32 / ln 2 = k + r with k an integer and |r| <= 1/2; e^x = 2^(k / 32) * 2^(r / 32), the first
    from a table and the second a cubic in f64. The library takes r and the cubic with fused
    products. Here r is exact before its one rounding as there; the cubic is not fused, which
    changes no result in f32 for any of the 2^32 inputs.
    """
    wide = x.clamp(SMALLEST, LARGEST).double()
    shifted = wide * INVERSE + SHIFT
    k = shifted.view(torch.int64)
    r = (wide * INVERSE_HIGH - (shifted - SHIFT)) + wide * INVERSE_LOW
    power = (exp_powers(x.device)[k & 31] + (k << 47)).view(torch.float64)
    y = (r * CUBE + SQUARE) * (r * r) + (r * LINEAR + 1.0)
    return (y * power).float().masked_fill_(x > LARGEST, torch.inf)


@lru_cache(maxsize=16)
def exp_powers(device: torch.device) -> Tensor:
    """Return [32] i64: the bits of 2^(j / 32) in f64, less j << 47.

    Adding k << 47 to entry k & 31 then gives the bits of 2^(k / 32).
    """
    with localcontext() as context:
        context.prec = 40  # the nearest f64, whatever the machine's own power function gives
        powers = [float((Decimal(2).ln() * j / 32).exp()) for j in range(32)]
    bits = torch.tensor(powers, dtype=torch.float64).view(torch.int64)
    return (bits - (torch.arange(32) << 47)).to(device)
