"""The row that a sublayer reads from the residual streams."""

from __future__ import annotations

import torch
from torch import Tensor

from .rms_norm import rms_norm


def hc_collapse(streams: Tensor, pre: Tensor, dtype: torch.dtype) -> Tensor:
    """Mix the residual streams into one row: x[t] = sum over s of pre[t, s] * streams[t, s].

    streams  [T, S, H] bf16 or f32
    pre      [T, S] f32
    returns  [T, H] `dtype`; summed in f32

    Source: model specification, section 3.1, COLLAPSE.
    """
    return torch.bmm(pre.unsqueeze(1), streams.float()).squeeze(1).to(dtype)


def hc_collapse_norm(
    streams: Tensor, pre: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """Mix the streams into one row and scale it to unit mean square.

    streams  [T, S, H] bf16 or f32
    pre      [T, S] f32
    weight   [H] f32
    returns  [T, H] `dtype`; the mixed row is rounded to it before its norm as well

    Source: model specification, sections 2.2, 2.3 and 3.1, COLLAPSE.
    """
    return rms_norm(hc_collapse(streams, pre, dtype), weight, eps, dtype)
