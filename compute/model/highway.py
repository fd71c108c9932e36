"""A sublayer's place on the residual streams: its coefficients, what it reads, where it adds.

On a GPU each is a launch or two; torch would take dozens over tensors of all streams.
Source: model specification, sections 3.0 and 3.1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.reference import hc_collapse, hc_expand, hc_mix
from protocol.files.model_config import ModelConfig

from .precision import Numerics
from .weights import HighwayWeights


class Row(NamedTuple):
    """What a sublayer reads [T, H]."""

    x: Tensor  # in the activation dtype
    rounded: Tensor  # as inputs of fp8 and fp4 matrices are: f32, on a GPU in the activation dtype


class Mix(NamedTuple):
    """Coefficients of one site. `pre` serves the NEXT sublayer, post and comb this one."""

    pre: Tensor  # [T, S]
    post: Tensor  # [T, S]
    comb: Tensor  # [T, S, S]


def mix_settings(config: ModelConfig) -> dict[str, Any]:
    """Return what `hc_mix` is told of the model beside tensors."""
    return {
        "n_iterations": config.hc_sinkhorn_iters,
        "hc_eps": config.hc_eps,
        "norm_eps": config.norm_eps,
    }


def mix(streams: Tensor, weights: HighwayWeights, config: ModelConfig) -> Mix:
    """Return the coefficients that the streams [T, S, H] give a site."""
    launch = hc_mix.hc_mix
    if streams.is_cuda:
        from kernels.hc_mix import hc_mix as launch  # noqa: PLC0415  Triton takes long to import
    return Mix(
        *launch(
            streams.contiguous(),
            weights.fn,
            weights.scale,
            weights.base,
            **mix_settings(config),
        )
    )


def read(streams: Tensor, pre: Tensor, norm: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Return the row [T, H] that a sublayer reads: the streams collapsed and normed."""
    if not streams.is_cuda:
        return hc_collapse.hc_collapse_norm(streams, pre, norm, eps, dtype)
    from kernels.hc_collapse import hc_collapse_norm  # noqa: PLC0415  as above

    return hc_collapse_norm(streams.contiguous(), pre.contiguous(), norm, eps, dtype)


def read_row(streams: Tensor, pre: Tensor, norm: Tensor, eps: float, numerics: Numerics) -> Row:
    """Return `read`'s row, and the same rounded."""
    dtype = numerics.activation
    if not streams.is_cuda:
        x = read(streams, pre, norm, eps, dtype)
        return Row(x, numerics.round_input(x))
    from kernels.hc_collapse import hc_collapse_norm  # noqa: PLC0415  as above

    rounded = None
    if numerics.rounds:
        shape = (streams.shape[0], streams.shape[2])
        rounded = torch.empty(shape, dtype=dtype, device=streams.device)
    streams, pre = streams.contiguous(), pre.contiguous()
    x = hc_collapse_norm(streams, pre, norm, eps, dtype, rounded=rounded)
    return Row(x, x if rounded is None else rounded)


def add(y: Tensor, streams: Tensor, site: Mix) -> Tensor:
    """Return the streams [T, S, H] after a sublayer that gave y [T, H]."""
    launch = hc_expand.hc_expand
    if streams.is_cuda:
        from kernels.hc_expand import hc_expand as launch  # noqa: PLC0415  as above
    return launch(y, streams.contiguous(), site.post, site.comb)
