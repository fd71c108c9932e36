"""What a token's experts gave, added in the order of its plan."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_parts(
    parts: Tensor,
    places: Tensor | None,
    shared: Tensor | None,
    dtype: torch.dtype,
    present: Tensor | None = None,
) -> Tensor:
    """Return [T, H] `dtype`: rows places[t, 0], places[t, 1] ... of parts, then shared[t], in f32.

    places   None: all rows of parts are one token's
    present  rows of parts that are 0 here are not read
    Source: model specification, section 3.7.
    """
    if places is None:
        places = torch.arange(parts.shape[0], device=parts.device).unsqueeze(0)
    if present is not None:
        parts = torch.where(present.unsqueeze(1) == 0, 0.0, parts)
    total = torch.zeros((places.shape[0], parts.shape[1]), device=parts.device)
    for pick in range(places.shape[1]):
        total += parts[places[:, pick].long()].float()
    if shared is not None:
        total += shared.float()
    return total.to(dtype)
