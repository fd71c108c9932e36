"""The Engram before some blocks: rows of a table, keyed by n-grams, added to every stream.

Source: model specification, section 3.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.formats import FORMATS, fp8
from kernels.reference.engram_gate import engram_gate
from protocol.errors import ShardError
from protocol.files.model_config import ModelConfig
from protocol.files.slice_map import ROW_E4M3

from .matrix import linear
from .precision import Numerics
from .step import Step
from .weights import EngramWeights


class Engram:
    """One table's update; the rows were asked for when the step began."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: EngramWeights, numerics: Numerics
    ) -> None:
        table = config.engram_table(layer)
        assert table is not None
        self.config = config
        self.layer = layer
        self.table = table
        self.weights = weights
        self.numerics = numerics

    def __call__(self, step: Step, streams: Tensor) -> Tensor:
        """Return the streams [T, S, H] with this table's gated values added."""
        config, n = self.config, self.numerics
        rows = self._rows(step).view(step.n_tokens, -1)
        kv = linear(n.round_input(rows), self.weights.kv, n.activation).float()
        n_keys = config.hc_mult * config.hidden_size
        keys = torch.unflatten(kv[:, :n_keys], 1, (config.hc_mult, config.hidden_size))
        return engram_gate(streams, keys, kv[:, n_keys:], self.weights.weight, config.norm_eps)

    def _rows(self, step: Step) -> Tensor:
        """Return the rows [T * columns, k] in the activation dtype; E4M3 rows are exact in it."""
        w, dim = self.weights, self.config.engram_head_dim
        data = step.rows.take(step.engram_handles[self.table])[:, : w.row_bytes]
        try:
            if w.row_format == ROW_E4M3:
                rows = fp8.dequantise_rows(data[:, :dim], data[:, dim:])
            else:
                rows = FORMATS[w.row_format].dequantise(data)
            return rows.to(self.numerics.activation)
        except ValueError as error:
            raise ShardError(f"layer {self.layer} Engram table: {error}") from None
