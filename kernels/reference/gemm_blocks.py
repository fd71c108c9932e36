"""Many rows, rounded to tiled blocks, times one matrix of blocks as it is stored."""

from __future__ import annotations

from torch import Tensor

from kernels.formats import FORMATS
from kernels.formats.block import apart, read_f16

from .tiled_rows import SUM, dequantise, tiled_rows

# The form that rows are rounded to, by the format of the matrix.
FORMS = {"Q2_K": "D2S6", "Q3_K": "D4", "Q4_K": "D4", "Q6_K": "D4", "Q8_0": "D4"}


def gemm_blocks(x: Tensor, weight: Tensor, name: str) -> Tensor:
    """Multiply rows rounded to tiled blocks with exact weights, but for Q2_K's minima.

    A group's minimum is multiplied with the rows' sums, which in D2S6 are mostly not its codes'.
    Arguments and result as `kernels.gemm_blocks.gemm_blocks`.
    """
    matrix = FORMATS[name].dequantise(weight).double()
    rows = tiled_rows(x, FORMS[name])
    rounded = dequantise(rows, matrix.shape[1])
    product = rounded @ matrix.T
    if name == "Q2_K":
        block = apart(weight, -1, 84)
        minima = read_f16(block[..., 82:84]).double() * (block[..., :16] >> 4).double()
        of_codes = apart(rounded, -1, SUM).sum(-1)
        more = of_codes - rows.sums[:, : of_codes.shape[1]].double()
        product += more @ minima.flatten(1).T
    return product.float()
