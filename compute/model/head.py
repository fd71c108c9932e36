"""From the streams after the last layer to logits. Source: model specification, section 3.8."""

from __future__ import annotations

import torch
from torch import Tensor

from .highway import read
from .matrix import Matrix, linear
from .precision import Numerics


class Head:
    """Final norm and output matrix; the last layer's pre-mix collapses the streams."""

    def __init__(self, norm: Tensor, matrix: Matrix, eps: float, numerics: Numerics) -> None:
        self.norm = norm
        self.matrix = matrix
        self.eps = eps
        self.numerics = numerics

    def __call__(self, streams: Tensor, pre: Tensor) -> Tensor:
        """Return logits [T, vocab] f32 of streams [T, S, H] and pre [T, S]."""
        dtype = self.numerics.activation
        y = read(streams, pre, self.norm, self.eps, dtype)
        return linear(y, self.matrix, torch.float32)
