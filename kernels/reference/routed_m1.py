"""The routed experts of one token, in plan order."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.formats import fp4
from kernels.formats.fp4_expert import Fp4Shape

from .linear import linear
from .round_fp8 import round_fp8
from .swiglu import swiglu


def routed_m1(
    x: Tensor, pointers: Tensor, weights: Tensor, shape: Fp4Shape, limit: float, dtype: torch.dtype
) -> Tensor:
    """Sum one token's experts in plan order: sum over e of w2(weight * act(w1 x, w3 x)).

    Arguments as `kernels.routed_m1.routed_m1`, on the CPU; returns [hidden] f32.
    Source: model specification, section 3.7.
    """
    total = torch.zeros(shape.hidden)
    rounded = round_fp8(x)
    for expert in range(weights.shape[0]):
        gate_at, up_at, down_at = (int(at) for at in pointers[:, expert])
        if gate_at == 0:
            continue
        gate = linear(rounded, _matrix(gate_at, shape.gate_scale, shape.width, shape.hidden), dtype)
        up = linear(rounded, _matrix(up_at, shape.up_scale, shape.width, shape.hidden), dtype)
        activated = swiglu(gate, up, limit, weights[expert : expert + 1]).to(dtype)
        down = _matrix(down_at, shape.down_scale, shape.hidden, shape.width)
        total += linear(round_fp8(activated), down, dtype)[0].float()
    return total


def _matrix(at: int, scale: int, n: int, k: int) -> Tensor:
    packed = torch.frombuffer((ctypes.c_uint8 * (n * k // 2)).from_address(at), dtype=torch.uint8)
    scales = (ctypes.c_uint8 * (n * k // 32)).from_address(at + scale)
    codes = torch.frombuffer(scales, dtype=torch.uint8)
    return fp4.dequantise(packed.view(n, k // 2), codes.view(n, k // 32))
