"""Shapes that make a result's bits independent of how many rows it is computed with.

The CPU library has several orders of summation and, for functions like exp, two codes: which of
them a value meets depends on the tensor's shape and on the processor. The library is asked for one
order whatever the shape; where it does not keep to it, rows are filled up to numbers whose products
are found alike.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import pad

from .one_order import ask_for_one_order

ask_for_one_order()

# (step, many): fewer rows than `many` are filled up to a multiple of `step`.
RULES = ((1, 1), (4, 12), (16, 16))
_MOST_ROWS = 24  # looked at one by one
_BASE_ROWS = 48
_PROBES = ((64, 48), (256, 256), (512, 100), (4096, 16))  # (k, n)
_VECTORS = 32


def fill_rows(x: Tensor) -> Tensor:
    """Rows of a product, with copies of the first added where the library needs them.

    x        [T, ...] f32
    returns  [T or a little more, ...] f32, the first T being x; x itself on other devices
    """
    if x.device.type != "cpu":
        return x
    step, many = rule()
    n_rows = x.shape[0]
    missing = -n_rows % step
    if n_rows >= many or not missing:
        return x
    if n_rows == 1:
        return x.expand(step, *x.shape[1:])
    return torch.cat([x, x[:1].expand(missing, *x.shape[1:])])


@functools.cache
def rule() -> tuple[int, int]:
    """Return the first of RULES under which all products here are alike, else the last one.

    Where the library keeps to one order that is the first. AMD's processors got along with
    multiples of 4, an Intel of 2017 with 16 rows; in MKL's code for AVX2, and on newer Intels with
    many cores, no rule holds without that order.
    """
    unlike = unlike_numbers()
    for step, many in RULES:
        filled = {n if n >= many else -(-n // step) * step for n in range(1, _MOST_ROWS)}
        if not filled & unlike:
            return step, many
    return RULES[-1]


def unlike_numbers() -> frozenset[int]:
    """Return the numbers of rows whose product has other bits than the same rows of a larger."""
    source = torch.Generator().manual_seed(1)
    unlike: set[int] = set()
    for k, n in _PROBES:
        x = torch.randn(_BASE_ROWS, k, generator=source)
        weight = torch.randn(n, k, generator=source)
        base = functional.linear(x, weight)
        unlike |= {
            n_rows
            for n_rows in range(1, _MOST_ROWS)
            if not torch.equal(functional.linear(x[:n_rows], weight), base[:n_rows])
        }
    return frozenset(unlike)


def fill_columns(x: Tensor) -> Tensor:
    """A function's argument [..., k] with zeros added up to a multiple of 32 columns.

    Values that do not fill whole vectors are computed one by one, by another exp.
    """
    missing = -x.shape[-1] % _VECTORS
    return pad(x, (0, missing)) if missing and x.device.type == "cpu" else x
