"""The Engram before some layers for one token, as launches. See `compute.model.engram`.

The token's rows lie in a device buffer of the step, brought there from the host's memory, where
who fetched them has put them.
Source: model specification, section 3.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compute.model.launched_engram import stored_values
from compute.model.model import Model
from compute.model.weights import EngramWeights
from kernels.bring import bring
from kernels.engram_gate import engram_gate

from .products import product
from .step_buffers import StepBuffers


class EngramStep:
    """Adds the tables' values; `staged[table]` [columns, bytes] u8, on the host, takes the rows."""

    def __init__(self, model: Model, buffers: StepBuffers) -> None:
        config = self._config = model.config
        self._buffers = buffers
        self._numerics = model.numerics
        self._weights: dict[int, EngramWeights] = {}
        self.staged: list[Tensor] = []
        self._rows: list[Tensor] = []
        for layer in config.engram_layers:
            weights = model.blocks[layer].weights.engram
            assert weights is not None
            self._weights[layer] = weights
            shape = (config.engram_columns, weights.row_bytes)
            self._rows.append(torch.zeros(shape, dtype=torch.uint8, device=model.device))
            self.staged.append(
                torch.zeros(shape, dtype=torch.uint8, pin_memory=model.device.type == "cuda")
            )

    def has(self, layer: int) -> bool:
        """Whether a table is added before this layer."""
        return layer in self._weights

    def add(self, layer: int) -> None:
        """Launch the layer's update: fills its streams."""
        w, b, table = self._weights[layer], self._buffers, self._config.engram_table(layer)
        assert table is not None
        rows = self._rows[table]
        bring(self.staged[table], rows)
        values = stored_values(rows, w, self._config, self._numerics, torch.float32)
        kv = product(values, w.kv)
        engram_gate(
            b.before_engram[table],
            kv,
            w.weight,
            self._config.norm_eps,
            dtype=self._numerics.activation,
            out=b.streams[layer],
        )
