"""Engram rows as they are stored, made into the input of the table's matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.formats import FORMATS, fp8

from .round_fp8 import round_fp8


def engram_rows(
    data: Tensor, dim: int, *, dtype: torch.dtype, rounds: bool, row_format: str = fp8.NAME
) -> Tensor:
    """Dequantise rows of a table and round them for the matrix.

    data        [T, columns, bytes] u8; bytes beyond a row's own are not read
    dim         values of a row
    row_format  "E4M3": dim values, then dim / 32 E8M0 scales; or a block format's name
    returns     [T, columns * dim] f32: cast to `dtype`, then rounded to fp8 where `rounds`

    Raises ValueError on scale byte 255. Source: model specification, section 3.2, Row read.
    """
    n_tokens = data.shape[0]
    rows = data.flatten(0, 1)
    if row_format == fp8.NAME:
        values = fp8.dequantise_rows(rows[:, :dim], rows[:, dim : dim + dim // fp8.TILE])
    else:
        block = FORMATS[row_format]
        n_bytes = dim // block.BLOCK_VALUES * block.BLOCK_BYTES
        values = block.dequantise(rows[:, :n_bytes])
    cast = values.to(dtype).view(n_tokens, -1)
    return round_fp8(cast) if rounds else cast.float()
