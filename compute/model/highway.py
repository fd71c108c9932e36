"""A sublayer's place on the residual streams: its coefficients, and the delayed pre-mix.

Source: model specification, sections 3.0 and 3.1.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kernels.reference.hc_mix import hc_mix
from protocol.files.model_config import ModelConfig

from .weights import HighwayWeights


class Mix(NamedTuple):
    """Coefficients of one site. `pre` serves the NEXT sublayer, post and comb this one."""

    pre: Tensor  # [T, S]
    post: Tensor  # [T, S]
    comb: Tensor  # [T, S, S]


def mix(streams: Tensor, weights: HighwayWeights, config: ModelConfig) -> Mix:
    """Return the coefficients that the streams [T, S, H] give a site."""
    return Mix(
        *hc_mix(
            streams,
            weights.fn,
            weights.scale,
            weights.base,
            n_iterations=config.hc_sinkhorn_iters,
            hc_eps=config.hc_eps,
            norm_eps=config.norm_eps,
        )
    )
