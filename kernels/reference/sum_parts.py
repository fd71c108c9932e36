"""What a token's experts gave, added in the order of its plan."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_parts(parts: Tensor, places: Tensor, shared: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return [T, H] `dtype`: rows places[t, 0], places[t, 1] ... of parts, then shared[t], in f32.

    Source: model specification, section 3.7.
    """
    total = torch.zeros((places.shape[0], parts.shape[1]), device=parts.device)
    for pick in range(places.shape[1]):
        total += parts[places[:, pick].long()].float()
    if shared is not None:
        total += shared.float()
    return total.to(dtype)
