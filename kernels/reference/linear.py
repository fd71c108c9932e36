"""Matrix products of activations with dequantised weights.

Invariants: on the CPU a row's bits do not depend on how many rows there are; see fill_rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .fill_rows import fill_rows


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply rows with a matrix: x . weight^T, summed in f32, one cast at the end.

    x        [T, k] bf16 or f32
    weight   [n, k] f32, dequantised
    returns  [T, n] `dtype`

    Because all scales are powers of two, this equals the product of the codes with the scales
    applied to each block of 32, up to the order of summation.
    Source: model specification, section 2.2, Scaled GEMM.
    """
    n_rows = x.shape[0]
    return functional.linear(fill_rows(x.float()), weight)[:n_rows].to(dtype)


def grouped_linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply each group of channels with its own matrix.

    x        [T, groups, k] bf16 or f32
    weight   [groups, n, k] f32
    returns  [T, groups, n] `dtype`

    Source: model specification, section 3.3, step 6.
    """
    parts = [linear(x[:, group], matrix, dtype) for group, matrix in enumerate(weight)]
    return torch.stack(parts, 1)
