"""A few rows times one matrix of blocks as it is stored."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.formats import FORMATS

from .q8_1_rows import dequantise, q8_1_rows


def gemv_blocks(x: Tensor, weight: Tensor, name: str, groups: int) -> Tensor:
    """Multiply rows rounded to q8_1 with exact weights; each group of matrix rows its channels.

    Arguments and result as `kernels.gemv_blocks.gemv_blocks`.
    """
    matrix = FORMATS[name].dequantise(weight).double()
    n, k = matrix.shape
    rounded = dequantise(*q8_1_rows(x.reshape(-1, k)), k).view(-1, groups, k)
    product = torch.bmm(
        rounded.transpose(0, 1), matrix.view(groups, n // groups, k).transpose(1, 2)
    )
    return product.transpose(0, 1).reshape(x.shape[0], n).float()
