"""How many rows kernels are launched on, and rows that do not lie side by side."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

# One, two, the most that kernels for a few rows take, one more, and more than a tile has.
ROWS = (1, 2, 8, 9, 33)


def rows_on(device: str, most: int = ROWS[-1]) -> Sequence[int]:
    """Return numbers of rows: a few under the interpreter, on a device every one up to `most`."""
    return [n for n in ROWS if n <= most] if device == "cpu" else range(1, most + 1)


def row_cases(most: int = ROWS[-1]) -> list[ParameterSet]:
    """Return cases of a device and a number of rows, for parameters."""
    marks = {"cpu": pytest.mark.interpreter, "cuda": pytest.mark.gpu}
    return [
        pytest.param(device, n, marks=mark)
        for device, mark in marks.items()
        for n in rows_on(device, most)
    ]


def apart(x: Tensor, device: str, gap: int = 3) -> Tensor:
    """Return rows [n, k] on a device with what is no number, or 77, between them."""
    width = x.shape[1]
    poison = float("nan") if x.is_floating_point() else 77
    wide = torch.full((len(x), width + gap), poison, dtype=x.dtype, device=device)
    wide[:, :width] = x.to(device)
    return wide[:, :width]
