"""Compressed rows, index keys and the choice of rows for one token, from and into fixed buffers.

Only kv sources write rows and keys, only index sources choose. See `compute.model.source_launches`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compute.model.candidates import restricts
from compute.model.model import Model
from compute.model.sequence import Sequence
from compute.model.source_launches import SourceLaunches

from .products import product
from .step_buffers import StepBuffers


class IndexStep:
    """What a source layer does beside its attention; nothing on other layers."""

    def __init__(
        self, model: Model, layer: int, sequence: Sequence, buffers: StepBuffers, turns: Tensor
    ) -> None:
        config = self._config = model.config
        self._layer = layer
        self._ratio = config.ratio(layer)
        self._weights = model.blocks[layer].weights.attention
        self._launches = SourceLaunches(config, layer, self._weights, model.numerics, product)
        self._sequence = sequence
        self._buffers = buffers
        self._turns = turns
        self._kept = _candidates(model, sequence, buffers)
        source = config.kv_source(layer)
        self._keys = None if source is None else sequence.keys[source]

    def run(self, x: Tensor, qr: Tensor) -> None:
        """Launch what the layer has; x [1, H] f32 as it is, qr [1, q rank] f32 rounded."""
        if self._weights.compressor is not None:
            self._launches.write_rows(self._sequence, x, self._buffers.first, self._turns)
        if self._weights.index_q is not None:
            self._choose(x, qr)

    def _choose(self, x: Tensor, qr: Tensor) -> None:
        b, kept = self._buffers, self._kept
        assert self._keys is not None
        n_groups = min(-(-b.reach // self._ratio), self._keys.shape[0])
        if kept is not None:
            kept = kept[:, : -(-n_groups // self._config.candidate_block_size)]
        self._launches.choose(
            x, qr, b.first, self._turns, self._keys[:n_groups], kept, b.selections[self._layer]
        )


def _candidates(model: Model, sequence: Sequence, buffers: StepBuffers) -> Tensor | None:
    """The step's one mask of kept blocks [1, blocks] u8; None where no block is ever left out."""
    config = model.config
    source = config.candidate_source_layer
    if source < 0 or not restricts(sequence.keys[source].shape[0], config):
        return None
    if buffers.kept is None:
        n_blocks = -(-sequence.keys[source].shape[0] // config.candidate_block_size)
        buffers.kept = torch.ones((1, n_blocks), dtype=torch.uint8, device=model.device)
    return buffers.kept
