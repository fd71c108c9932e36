"""The router's score of an expert."""

from __future__ import annotations

import torch
from torch import Tensor

from .expf import expf
from .log1pf import log1pf

LINEAR_ABOVE = 20.0


def softplus_sqrt(logits: Tensor) -> Tensor:
    """Return sqrt(softplus(logit)) with softplus(v) = log1p(e^v), and v itself above 20.

    logits   f32, any shape
    returns  f32, the same shape, bit-equal to glibc 2.36's functions, but for the payload of a NaN

    The tensor library's own softplus has other bits for one value than for a vector of them.
    Source: model specification, sections 3.7 and 4.3.
    """
    soft = log1pf(expf(logits))
    # through f64, whose root is near enough: the library's own f32 root is not always the nearest
    return torch.where(logits > LINEAR_ABOVE, logits, soft).double().sqrt().float()
