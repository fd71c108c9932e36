"""The groups of a kv source that close within a step: latents and compressed rows."""

from __future__ import annotations

import torch
from torch import Tensor

from .pool_groups import pool_groups
from .rms_norm import rms_norm
from .rotate import rotate
from .round_fp4_latent import round_fp4_latent


def pool_latents(
    projected: Tensor,
    first: Tensor,
    ratio: int,
    open_kv: Tensor | None,
    open_scores: Tensor | None,
    norm: Tensor,
    turns: Tensor,
    rows: Tensor,
    eps: float,
    *,
    dtype: torch.dtype,
    rounds: bool,
    latent: Tensor,
) -> Tensor:
    """Pool tokens into groups; write the open state, latents and compressed rows.

    As `kernels.pool_latents.pool_latents`, which says what each tensor is.
    Source: model specification, sections 3.4 and 2.2.
    """
    begin, n_tokens = int(first), len(projected)
    latent.zero_()
    pooled = projected
    if open_kv is not None and open_scores is not None:
        kv, scores = projected.chunk(2, dim=1)
        n_slots = len(open_kv)
        before = [p % n_slots for p in range(begin - begin % ratio, begin)]
        all_kv, all_scores = (
            torch.cat([open_kv[before], kv]),
            torch.cat([open_scores[before], scores]),
        )
        n_closed = len(all_kv) // ratio * ratio
        shape = (-1, ratio, kv.shape[1])
        pooled = kv[:0]
        if n_closed:
            pooled = pool_groups(all_kv[:n_closed].view(shape), all_scores[:n_closed].view(shape))
        kept = range(max(0, n_tokens - n_slots), n_tokens)
        slots = [(begin + t) % n_slots for t in kept]
        open_kv[slots], open_scores[slots] = kv[kept.start :], scores[kept.start :]
    n_groups = len(pooled)
    if n_groups:
        group = begin // ratio
        position = torch.arange(group, group + n_groups, device=rows.device) * ratio
        row = rms_norm(pooled.to(dtype), norm, eps, dtype)
        latent[:n_groups] = row.float()
        turned = rotate(row, torch.view_as_complex(turns[position]))
        rows[group : group + n_groups] = (round_fp4_latent(turned) if rounds else turned).to(dtype)
    return latent
