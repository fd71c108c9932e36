"""Stops of the tour of kernels: their list, and the tensors that they launch kernels on.

A tensor is as large as its values: where allocations are not shared, a read behind it is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

BF16, F32 = torch.bfloat16, torch.float32
DEVICE = "cuda"
LIMIT, EPS = 10.0, 1e-6
ROWS = (1, 9)

Stop = Callable[[], None]
Stops = dict[str, Stop]  # "module.function" of a kernel, and what launches it


def into(stops: Stops, *kernels: str) -> Callable[[Stop], Stop]:
    """Say which kernels a function launches."""

    def named(function: Stop) -> Stop:
        stops.update(dict.fromkeys(kernels, function))
        return function

    return named


def numbers(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    """Return random numbers in an allocation of just their size."""
    return torch.randn(shape).to(dtype).to(DEVICE)


def strided(rows: int, width: int, gap: int = 3) -> Tensor:
    """Return random rows with a gap between them, and nothing behind the last one."""
    stride = width + gap
    return numbers((rows - 1) * stride + width).as_strided((rows, width), (stride, 1))


def codes(*shape: int, low: int = 0, high: int = 256) -> Tensor:
    """Return random bytes; as E4M3 or fp4 codes, or as scales from `low` on, they are numbers."""
    return torch.randint(low, high, shape, dtype=torch.uint8).to(DEVICE)


def scale_codes(*shape: int) -> Tensor:
    """Return E8M0 scales around 1."""
    return codes(*shape, low=118, high=130)


def i32(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    """Return whole numbers as they are given."""
    return torch.tensor(values, dtype=torch.int32).to(DEVICE)


def i64(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    """The same of 64 bits."""
    return torch.tensor(values, dtype=torch.int64).to(DEVICE)


def turns_to(end: int, n_pairs: int) -> Tensor:
    """Return the turns of positions below `end`."""
    return numbers(end, n_pairs, 2)
