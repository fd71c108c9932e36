"""The routed experts of many rows, a part for each (token, expert)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kernels.formats.fp4_expert import Fp4Shape
from kernels.formats.k_expert import BlockShape

from .gemm_blocks import gemm_blocks
from .linear import linear
from .round_fp8 import round_fp8
from .routed_m1 import blocks_at, fp4_matrix
from .swiglu import routed_swiglu


def routed_rows(
    x: Tensor,
    tokens: Tensor,
    weights: Tensor,
    starts: Sequence[int],
    pointers: Tensor,
    shape: Fp4Shape | BlockShape,
    limit: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return w2(weight * act(w1 x, w3 x)) [R, hidden] `dtype` of each pair, group by group.

    Arguments as `kernels.routed_rows.routed_rows`, on the CPU; rows of absent experts are zero.
    Source: model specification, section 3.7.
    """
    parts = torch.zeros((len(tokens), shape.hidden), dtype=dtype)
    for group, (first, end) in enumerate(pairwise(starts)):
        gate_at, up_at, down_at = (int(at) for at in pointers[:, group])
        if gate_at == 0 or first == end:
            continue
        rows = x[tokens[first:end].long()]
        if isinstance(shape, BlockShape):
            gate = _blocks_product(rows, gate_at, shape.gate, shape.width).to(dtype)
            up = _blocks_product(rows, up_at, shape.up, shape.width).to(dtype)
        else:
            gate = _fp4_product(rows, gate_at, shape.gate_scale, shape.width, dtype)
            up = _fp4_product(rows, up_at, shape.up_scale, shape.width, dtype)
        activated = routed_swiglu(gate, up, limit, weights[first:end]).to(dtype)
        if isinstance(shape, BlockShape):
            part = _blocks_product(activated, down_at, shape.down, shape.hidden).to(dtype)
        else:
            part = _fp4_product(activated, down_at, shape.down_scale, shape.hidden, dtype)
        parts[first:end] = part
    return parts


def _fp4_product(rows: Tensor, at: int, scale: int, n: int, dtype: torch.dtype) -> Tensor:
    return linear(round_fp8(rows), fp4_matrix(at, scale, n, rows.shape[1]), dtype)


def _blocks_product(rows: Tensor, at: int, name: str, n: int) -> Tensor:
    return gemm_blocks(rows, blocks_at(at, name, n, rows.shape[1]), name)
