"""Rotary position encoding of a row's last channels."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn the last channels as adjacent (even, odd) pairs: pair i times turns[..., i].

    x        [T, ..., k] bf16 or f32
    turns    [T, r / 2] complex64, r <= k; conjugated for the inverse
    returns  [T, ..., k], dtype of x; the first k - r channels as they are

    Computed in f32. Source: model specification, section 2.4.
    """
    n_turned = 2 * turns.shape[-1]
    while turns.ndim < x.ndim:
        turns = turns.unsqueeze(1)
    head, tail = x[..., :-n_turned], x[..., -n_turned:]
    pairs = torch.view_as_complex(torch.unflatten(tail.float(), -1, (-1, 2)))
    turned = torch.view_as_real(pairs * turns).flatten(-2)
    return torch.cat([head, turned.to(x.dtype)], dim=-1)
