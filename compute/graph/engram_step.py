"""The Engram before some layers for one token, as launches. See `compute.model.engram`.

The token's rows lie in a device buffer of the step, copied there by whoever fetched them.
Source: model specification, section 3.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compute.model.launched_engram import stored_values
from compute.model.model import Model
from compute.model.weights import EngramWeights
from kernels.engram_gate import engram_gate

from .products import product
from .step_buffers import StepBuffers


class EngramStep:
    """Adds the tables' values; `rows[table]` [columns, bytes] u8 takes the token's rows."""

    def __init__(self, model: Model, buffers: StepBuffers) -> None:
        config = self._config = model.config
        self._buffers = buffers
        self._numerics = model.numerics
        self._weights: dict[int, EngramWeights] = {}
        self.rows: list[Tensor] = []
        for layer in config.engram_layers:
            weights = model.blocks[layer].weights.engram
            assert weights is not None
            self._weights[layer] = weights
            shape = (config.engram_columns, weights.row_bytes)
            self.rows.append(torch.zeros(shape, dtype=torch.uint8, device=model.device))

    def has(self, layer: int) -> bool:
        """Whether a table is added before this layer."""
        return layer in self._weights

    def add(self, layer: int) -> None:
        """Launch the layer's update: fills its streams."""
        w, b, table = self._weights[layer], self._buffers, self._config.engram_table(layer)
        assert table is not None
        values = stored_values(self.rows[table], w, self._config, self._numerics, torch.float32)
        kv = product(values, w.kv)
        engram_gate(
            b.before_engram[table],
            kv,
            w.weight,
            self._config.norm_eps,
            dtype=self._numerics.activation,
            out=b.streams[layer],
        )
