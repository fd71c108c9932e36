"""Rows whose groups of 32 are nothing, tiny and huge, for kernels that round them."""

from __future__ import annotations

import torch
from torch import Tensor


def extreme_rows(n: int, k: int, dtype: torch.dtype) -> Tensor:
    """Return [n, k] `dtype`: normal numbers, but for the first and last groups of two rows."""
    x = torch.randn(n, k, generator=torch.Generator().manual_seed(n + k))
    x[0, :32] = 0
    x[-1, -32:] *= 1e30
    x[-1, :32] *= 1e-20
    x[0, -32:] *= 1e-38
    return x.to(dtype)
