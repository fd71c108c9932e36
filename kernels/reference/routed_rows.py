"""The routed experts of many rows, a part for each (token, expert)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kernels.formats.fp4_expert import Fp4Shape

from .linear import linear
from .round_fp8 import round_fp8
from .routed_m1 import fp4_matrix
from .swiglu import swiglu


def routed_rows(
    x: Tensor,
    tokens: Tensor,
    weights: Tensor,
    starts: Sequence[int],
    pointers: Tensor,
    shape: Fp4Shape,
    limit: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return w2(weight * act(w1 x, w3 x)) [R, hidden] `dtype` of each pair, group by group.

    Arguments as `kernels.routed_rows.routed_rows`, on the CPU; rows of absent experts are zero.
    Source: model specification, section 3.7.
    """
    rounded = round_fp8(x)
    parts = torch.zeros((len(tokens), shape.hidden), dtype=dtype)
    for group, (first, end) in enumerate(pairwise(starts)):
        gate_at, up_at, down_at = (int(at) for at in pointers[:, group])
        if gate_at == 0 or first == end:
            continue
        rows = rounded[tokens[first:end].long()]
        gate = linear(rows, fp4_matrix(gate_at, shape.gate_scale, shape.width, shape.hidden), dtype)
        up = linear(rows, fp4_matrix(up_at, shape.up_scale, shape.width, shape.hidden), dtype)
        activated = swiglu(gate, up, limit, weights[first:end]).to(dtype)
        down = fp4_matrix(down_at, shape.down_scale, shape.hidden, shape.width)
        parts[first:end] = linear(round_fp8(activated), down, dtype)
    return parts
