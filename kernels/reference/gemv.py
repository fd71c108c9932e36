"""A few rows times one dense matrix as it is stored."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.formats import fp8


def gemv(x: Tensor, weight: Tensor, scales: Tensor | None, groups: int) -> Tensor:
    """Multiply rows with a matrix in f32, each group of matrix rows with its own channels.

    Arguments and result as `kernels.gemv.gemv`.
    """
    matrix = weight.float() if scales is None else fp8.dequantise_tiles(weight, scales)
    n, k = matrix.shape
    product = torch.bmm(
        x.view(-1, groups, k).transpose(0, 1), matrix.view(groups, n // groups, k).transpose(1, 2)
    )
    return product.transpose(0, 1).reshape(x.shape[0], n)
