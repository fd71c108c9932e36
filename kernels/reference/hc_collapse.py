"""The row that a sublayer reads from the residual streams."""

from __future__ import annotations

import torch
from torch import Tensor


def hc_collapse(streams: Tensor, pre: Tensor, dtype: torch.dtype) -> Tensor:
    """Mix the residual streams into one row: x[t] = sum over s of pre[t, s] * streams[t, s].

    streams  [T, S, H] bf16 or f32
    pre      [T, S] f32
    returns  [T, H] `dtype`; summed in f32

    Source: model specification, section 3.1, COLLAPSE.
    """
    return torch.bmm(pre.unsqueeze(1), streams.float()).squeeze(1).to(dtype)
