"""Shapes that make a result's bits independent of how many rows it is computed with.

The CPU library has several orders of summation and, for functions like exp, two codes: which of
them a value meets depends on the tensor's shape alone. Padding keeps every value on the common one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

MANY_ROWS = 12
_ROW_STEP = 4
_VECTORS = 32


def fill_rows(x: Tensor) -> Tensor:
    """Rows of a product, with copies of the first added where the library needs them.

    x        [T, ...] f32
    returns  [T or a little more, ...] f32, the first T being x; x itself on other devices

    The products of 1, 2, 3, 5, 6, 7, 9, 10 and 11 rows are summed in orders of their own, those of
    all other numbers of rows in one and the same: so the former are filled up to the latter.
    """
    n_rows = x.shape[0]
    missing = -n_rows % _ROW_STEP
    if n_rows >= MANY_ROWS or not missing or x.device.type != "cpu":
        return x
    if n_rows == 1:
        return x.expand(_ROW_STEP, *x.shape[1:])
    return torch.cat([x, x[:1].expand(missing, *x.shape[1:])])


def fill_columns(x: Tensor) -> Tensor:
    """A function's argument [..., k] with zeros added up to a multiple of 32 columns.

    Values that do not fill whole vectors are computed one by one, by another exp.
    """
    missing = -x.shape[-1] % _VECTORS
    return pad(x, (0, missing)) if missing and x.device.type == "cpu" else x
