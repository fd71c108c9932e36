"""Row numbers that make a product's bits independent of how many rows it has."""

from __future__ import annotations

import torch
from torch import Tensor

MANY_ROWS = 12
_ROW_STEP = 4


def fill_rows(x: Tensor) -> Tensor:
    """Rows of a product, with copies of the first added where the library needs them.

    x        [T, ...] f32
    returns  [T or a little more, ...] f32, the first T being x; x itself on other devices

    The CPU library sums the products of 1, 2, 3, 5, 6, 7, 9, 10 and 11 rows in orders of their own,
    and all other numbers of rows in one and the same: so the former are filled up to the latter.
    """
    n_rows = x.shape[0]
    missing = -n_rows % _ROW_STEP
    if n_rows >= MANY_ROWS or not missing or x.device.type != "cpu":
        return x
    if n_rows == 1:
        return x.expand(_ROW_STEP, *x.shape[1:])
    return torch.cat([x, x[:1].expand(missing, *x.shape[1:])])
