"""The residual streams after a sublayer."""

from __future__ import annotations

import torch
from torch import Tensor


def hc_expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Add a sublayer's row to the mixed streams.

    y        [T, H] bf16 or f32
    streams  [T, S, H] bf16 or f32
    post     [T, S] f32
    comb     [T, S, S] f32
    returns  [T, S, H], dtype of streams; summed in f32

    out[t, j] = post[t, j] * y[t] + sum over i of comb[t, i, j] * streams[t, i]: the FIRST index of
    comb is the one that is summed. Source: model specification, section 3.1, EXPAND.
    """
    added = post.unsqueeze(2) * y.float().unsqueeze(1)
    return torch.baddbmm(added, comb.transpose(1, 2), streams.float()).to(streams.dtype)
