"""Compressed rows and index keys, made by the kv sources.

Group g holds positions g * ratio .. g * ratio + ratio - 1 and is emitted when its last token
arrives; its rotary position is that of its FIRST token. Source: model specification, section 3.4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.pool_groups import pool_groups
from kernels.reference.rms_norm import rms_norm
from kernels.reference.rotate import rotate
from protocol.files.model_config import ModelConfig

from .matrix import linear
from .precision import Numerics
from .rotary import RotaryTable
from .step import Step
from .weights import CompressorWeights


class Compressor:
    """The compressor of one kv source, with the index key projection."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        weights: CompressorWeights,
        numerics: Numerics,
        rotary: RotaryTable,
    ) -> None:
        self.config = config
        self.layer = layer
        self.ratio = config.ratio(layer)
        self.weights = weights
        self.numerics = numerics
        self.rotary = rotary

    def __call__(self, step: Step, x: Tensor) -> None:
        """Append the groups that close within the step. x [T, H], not rounded."""
        pooled = self._pool(step, linear(x, self.weights.kv_gate, torch.float32))
        n_groups = len(pooled)
        if n_groups == 0:
            return
        n, eps, weights = self.numerics, self.config.norm_eps, self.weights
        first = step.first // self.ratio
        turns = self.rotary.turns(first * self.ratio, n_groups, self.ratio)
        groups = slice(first, first + n_groups)
        latent = rms_norm(pooled.to(n.activation), weights.norm, eps, n.activation)
        key = linear(latent, weights.key, n.activation)
        key = rms_norm(key, weights.key_norm, eps, n.activation)
        sequence = step.sequence
        sequence.keys[self.layer][groups] = n.round_index(rotate(key, turns))
        sequence.rows[self.layer][groups] = n.round_latent(rotate(latent, turns))
        sequence.published_keys = self.layer

    def _pool(self, step: Step, projected: Tensor) -> Tensor:
        """Pool tokens into groups [G, k] f32 and keep those of the group that stays open."""
        if self.ratio == 1:
            return projected
        ratio, group = self.ratio, step.sequence.open_groups[self.layer]
        n_open = step.first % ratio
        kv, scores = projected.chunk(2, dim=1)
        kv = torch.cat([group.kv[:n_open], kv])
        scores = torch.cat([group.scores[:n_open], scores])
        n_groups = len(kv) // ratio
        closed = n_groups * ratio
        n_left = len(kv) - closed
        group.kv[:n_left] = kv[closed:]
        group.scores[:n_left] = scores[closed:]
        shape = (n_groups, ratio, -1)
        if n_groups == 0:
            return kv[:0]
        return pool_groups(kv[:closed].view(shape), scores[:closed].view(shape))
