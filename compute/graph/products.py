"""One row times a dense matrix, into a given buffer."""

from __future__ import annotations

import torch
from torch import Tensor

from compute.model.matrix import BF16, FP8, ROW_BLOCKS, Matrix, StoredMatrix
from kernels.gemv import gemv
from kernels.gemv_blocks import gemv_blocks


def product(x: Tensor, matrix: Matrix, *, out: Tensor | None = None) -> Tensor:
    """Return x . matrix^T [1, n] f32, not rounded, in `out` where given.

    x  [1, k] f32, with groups [1, groups * k]
    """
    if isinstance(matrix, StoredMatrix) and matrix.format in {FP8, BF16}:
        return gemv(x, matrix.values, matrix.scales, groups=matrix.groups, out=out)
    if isinstance(matrix, StoredMatrix) and matrix.format in ROW_BLOCKS:
        return gemv_blocks(x, matrix.values, matrix.format, groups=matrix.groups, out=out)
    found = _f32_product(x, matrix)
    return found if out is None else out.copy_(found)


def _f32_product(x: Tensor, matrix: Matrix) -> Tensor:
    if isinstance(matrix, StoredMatrix):
        return matrix.row_product(x)
    if matrix.dim() == 2:
        return torch.nn.functional.linear(x, matrix)
    rows = x.view(matrix.shape[0], 1, -1)
    return torch.bmm(rows, matrix.transpose(1, 2)).view(1, -1)
