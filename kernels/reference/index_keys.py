"""The index keys of the groups that close within a step."""

from __future__ import annotations

import torch
from torch import Tensor

from .rms_norm import rms_norm
from .rotate import rotate
from .round_fp4_index import round_fp4_index


def index_keys(
    projected: Tensor,
    first: Tensor,
    n_tokens: int,
    ratio: int,
    norm: Tensor,
    turns: Tensor,
    keys: Tensor,
    eps: float,
    *,
    dtype: torch.dtype,
    rounds: bool,
) -> None:
    """Norm, turn and round the projected latents, and write them to `keys`.

    As `kernels.index_keys.index_keys`, which says what each tensor is.
    Source: model specification, sections 3.5 and 2.2.
    """
    begin = int(first)
    group, end = begin // ratio, (begin + n_tokens) // ratio
    if end == group:
        return
    position = torch.arange(group, end, device=keys.device) * ratio
    key = rms_norm(projected[: end - group].to(dtype), norm, eps, dtype)
    key = rotate(key, torch.view_as_complex(turns[position]))
    keys[group:end] = (round_fp4_index(key) if rounds else key).to(dtype)
