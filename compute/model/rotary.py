"""Rotary tables: the complex turn of every pair at every position.

Source: model specification, section 2.4. There is no magnitude scale.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from protocol.files.model_config import ModelConfig

_FIRST_POSITIONS = 1024


def plain_frequencies(config: ModelConfig) -> Tensor:
    """Angles per position [r / 2] f32 of layers of ratio 0."""
    return _frequencies(config.rope_theta, config.rope_head_dim)


def yarn_frequencies(config: ModelConfig) -> Tensor:
    """Angles per position [r / 2] f32 of layers of ratio > 0, whatever the sequence's length."""
    dim = config.rope_head_dim
    frequencies = _frequencies(config.compress_rope_theta, dim)

    def pair_of(rotations: float) -> float:
        turns = config.rope_original_length / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(config.compress_rope_theta))

    low = max(math.floor(pair_of(config.rope_beta_fast)), 0)
    high = min(math.ceil(pair_of(config.rope_beta_slow)), dim - 1)
    pairs = torch.arange(dim // 2, dtype=torch.float32)
    ramp = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies / config.rope_factor * ramp + frequencies * (1 - ramp)


class RotaryTable:
    """Turns exp(j * position * frequency), computed once and kept; grows with the positions."""

    def __init__(self, frequencies: Tensor, device: torch.device) -> None:
        self._frequencies = frequencies
        self._device = device
        self._turns = self._compute(_FIRST_POSITIONS)

    def turns(self, first: int, n: int, step: int = 1) -> Tensor:
        """Return the turns [n, r / 2] complex64 of positions first, first + step, ..."""
        end = first + (n - 1) * step + 1
        if end > len(self._turns):
            self._turns = self._compute(max(end, 2 * len(self._turns)))
        return self._turns[first:end:step]

    def table(self, n: int) -> Tensor:
        """Return (cos, sin) [n, r / 2, 2] f32 of positions 0 to n - 1."""
        return torch.view_as_real(self.turns(0, n).contiguous())

    def _compute(self, n: int) -> Tensor:
        # Angles are f32 products; sine and cosine of them are taken in f64 and rounded once.
        angles = torch.outer(torch.arange(n, dtype=torch.float32), self._frequencies).double()
        return torch.complex(angles.cos().float(), angles.sin().float()).to(self._device)


def _frequencies(theta: float, dim: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
