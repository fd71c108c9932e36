"""From the first projection of attention: the query latent, and the window row in its ring."""

from __future__ import annotations

import torch
from torch import Tensor

from .rms_norm import rms_norm
from .rotate import rotate
from .round_fp8 import round_fp8


def norm_latents(
    projected: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    first: Tensor,
    turns: Tensor,
    eps: float,
    *,
    dtype: torch.dtype,
    rounds: bool,
    ring: Tensor,
) -> Tensor:
    """Norm both parts of each row; the window row of position p goes to ring slot p mod W.

    projected  [T, q + k] f32, rounded to `dtype` before anything else
    q_norm     [q] f32; kv_norm [k] f32
    first      [1] int64, position of row 0
    turns      [P, r / 2, 2] f32, (cos, sin) by position
    rounds     whether both results are rounded to fp8 per 32 channels
    ring       [W, k] `dtype`, T <= W
    returns    [T, q] f32, exact in `dtype`

    Source: model specification, sections 2.2, 2.3, 2.4 and 3.3, steps 1 and 2.
    """
    values = projected.to(dtype)
    q, kv = values.split([len(q_norm), len(kv_norm)], dim=1)
    positions = first + torch.arange(len(values), device=first.device)
    qr = rms_norm(q, q_norm, eps, dtype)
    rows = rotate(rms_norm(kv, kv_norm, eps, dtype), torch.view_as_complex(turns[positions]))
    if rounds:
        qr, rows = round_fp8(qr), round_fp8(rows)
    ring[positions % len(ring)] = rows.to(dtype)
    return qr.float()
