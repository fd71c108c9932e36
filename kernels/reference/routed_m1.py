"""The routed experts of one token, in plan order."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.formats import FORMATS, fp4
from kernels.formats.fp4_expert import Fp4Shape
from kernels.formats.k_expert import BlockShape

from .linear import linear
from .q8_1_rows import dequantise, q8_1_rows
from .round_fp8 import round_fp8
from .swiglu import routed_swiglu


def routed_m1(
    x: Tensor,
    pointers: Tensor,
    weights: Tensor,
    shape: Fp4Shape | BlockShape,
    limit: float,
    dtype: torch.dtype,
) -> Tensor:
    """Sum one token's experts in plan order: sum over e of w2(weight * act(w1 x, w3 x)).

    Arguments as `kernels.routed_m1.routed_m1`, on the CPU; returns [hidden] f32.
    Source: model specification, section 3.7.
    """
    total = torch.zeros(shape.hidden)
    for expert in range(weights.shape[0]):
        gate_at, up_at, down_at = (int(at) for at in pointers[:, expert])
        if gate_at == 0:
            continue
        if isinstance(shape, BlockShape):
            gate = _blocks_product(x, gate_at, shape.gate, shape.width, dtype)
            up = _blocks_product(x, up_at, shape.up, shape.width, dtype)
        else:
            gate_scale, up_scale = shape.gate_scale, shape.up_scale
            gate = linear(
                round_fp8(x), fp4_matrix(gate_at, gate_scale, shape.width, shape.hidden), dtype
            )
            up = linear(round_fp8(x), fp4_matrix(up_at, up_scale, shape.width, shape.hidden), dtype)
        activated = routed_swiglu(gate, up, limit, weights[expert : expert + 1]).to(dtype)
        if isinstance(shape, BlockShape):
            part = _blocks_product(activated, down_at, shape.down, shape.hidden, dtype)
        else:
            down = fp4_matrix(down_at, shape.down_scale, shape.hidden, shape.width)
            part = linear(round_fp8(activated), down, dtype)
        total += part[0].float()
    return total


def _blocks_product(x: Tensor, at: int, name: str, n: int, dtype: torch.dtype) -> Tensor:
    """Rows rounded to q8_1 times a matrix of blocks, summed exactly and rounded once."""
    k = x.shape[1]
    matrix = FORMATS[name].dequantise(blocks_at(at, name, n, k)).double()
    return (dequantise(*q8_1_rows(x), k) @ matrix.T).float().to(dtype)


def blocks_at(at: int, name: str, n: int, k: int) -> Tensor:
    """Return a matrix [n, bytes of k values] u8 of blocks at an address of the CPU."""
    n_bytes = n * (k // FORMATS[name].BLOCK_VALUES * FORMATS[name].BLOCK_BYTES)
    stored = (ctypes.c_uint8 * n_bytes).from_address(at)
    return torch.frombuffer(stored, dtype=torch.uint8).view(n, -1)


def fp4_matrix(at: int, scale: int, n: int, k: int) -> Tensor:
    """Return [n, k] f32 of the codes at an address of the CPU and the scales `scale` bytes on."""
    packed = torch.frombuffer((ctypes.c_uint8 * (n * k // 2)).from_address(at), dtype=torch.uint8)
    scales = (ctypes.c_uint8 * (n * k // 32)).from_address(at + scale)
    codes = torch.frombuffer(scales, dtype=torch.uint8)
    return fp4.dequantise(packed.view(n, k // 2), codes.view(n, k // 32))
