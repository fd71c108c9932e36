"""One row times a dense matrix, into a given buffer."""

from __future__ import annotations

import torch
from torch import Tensor

from compute.model.matrix import Matrix
from kernels.reference import linear as reference


def product(x: Tensor, matrix: Matrix, *, out: Tensor | None = None) -> Tensor:
    """Return x . matrix^T [1, n] f32, not rounded, in `out` where given.

    x  [1, k] f32, with groups [1, groups * k]
    """
    if not isinstance(matrix, Tensor):
        return matrix.row_product(x, out=out)
    found = _f32_product(x, matrix)
    return found if out is None else out.copy_(found)


def _f32_product(x: Tensor, matrix: Tensor) -> Tensor:
    if matrix.dim() == 2:
        return reference.linear(x, matrix, torch.float32)
    groups = x.view(1, matrix.shape[0], -1)
    return reference.grouped_linear(groups, matrix, torch.float32).view(1, -1)
