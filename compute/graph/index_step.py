"""Compressed rows, index keys and the choice of rows for one token, as launches.

Only kv sources write rows and keys, only index sources choose. See `compute.model.compressor` and
`compute.model.indexer`. Source: model specification, sections 3.4 to 3.6.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compute.model.model import Model
from compute.model.sequence import Sequence
from kernels.index_keys import index_keys
from kernels.index_queries import index_queries
from kernels.index_scores import index_scores
from kernels.pool_latents import pool_latents
from kernels.select_blocks import select_blocks
from kernels.select_rows import select_rows

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
        self._dtype = model.numerics.activation
        self._sequence = sequence
        self._buffers = buffers
        self._turns = turns
        self._kept = _candidates(model, sequence, buffers)
        source = config.kv_source(layer)
        self._keys = None if source is None else sequence.keys[source]
        self._is_candidate_source = layer == config.candidate_source_layer
        self._uses_candidates = layer > config.candidate_source_layer >= 0

    def run(self, x: Tensor, qr: Tensor) -> None:
        """Launch what the layer has; x [1, H] f32 as it is, qr [1, q rank] f32 rounded."""
        if self._weights.compressor is not None:
            self._compress(x)
        if self._weights.index_q is not None:
            self._choose(x, qr)

    def _compress(self, x: Tensor) -> None:
        w, first = self._weights.compressor, self._buffers.first
        assert w is not None
        eps, sequence, layer = self._config.norm_eps, self._sequence, self._layer
        group = sequence.open_groups.get(layer)
        latent = pool_latents(
            product(x, w.kv_gate),
            first,
            self._ratio,
            None if group is None else group.kv,
            None if group is None else group.scores,
            w.norm,
            self._turns,
            sequence.rows[layer],
            eps,
            dtype=self._dtype,
            rounds=True,
        )
        index_keys(
            product(latent, w.key),
            first,
            1,
            self._ratio,
            w.key_norm,
            self._turns,
            sequence.keys[layer],
            eps,
            dtype=self._dtype,
            rounds=True,
        )

    def _choose(self, x: Tensor, qr: Tensor) -> None:
        config, w, first = self._config, self._weights, self._buffers.first
        assert w.index_q is not None
        assert w.index_heads is not None
        assert self._keys is not None
        n_groups = min(-(-self._buffers.reach // self._ratio), self._keys.shape[0])
        n_blocks = -(-n_groups // config.candidate_block_size)
        kept = None
        if self._kept is not None and n_blocks > config.candidate_top_blocks:
            kept = self._kept[:, :n_blocks]
        is_source = self._is_candidate_source and kept is not None
        scores = torch.empty((1, n_groups), dtype=torch.float32, device=x.device)
        if n_groups > config.index_top_k or is_source:  # else every visible row is chosen
            queries = index_queries(
                product(qr, w.index_q),
                first,
                self._turns,
                dim=config.index_head_dim,
                dtype=self._dtype,
                rounds=True,
            )
            keys = self._keys[:n_groups]
            heads = product(x, w.index_heads)
            index_scores(queries, heads, keys, first, self._ratio, dtype=self._dtype, scores=scores)
        if is_source:
            size, most = config.candidate_block_size, config.candidate_top_blocks
            select_blocks(scores, first, self._ratio, size, most, kept=kept)
        select_rows(
            scores,
            first,
            self._ratio,
            config.index_top_k,
            blocks=kept if self._uses_candidates else None,
            block_size=config.candidate_block_size,
            dtype=self._dtype,
            selection=self._buffers.selections[self._layer],
        )


def _candidates(model: Model, sequence: Sequence, buffers: StepBuffers) -> Tensor | None:
    """The step's one mask of kept blocks [1, blocks] u8; None where no block is ever left out."""
    config = model.config
    source = config.candidate_source_layer
    if source < 0:
        return None
    n_blocks = -(-sequence.keys[source].shape[0] // config.candidate_block_size)
    if n_blocks <= config.candidate_top_blocks:
        return None
    if buffers.kept is None:
        buffers.kept = torch.ones((1, n_blocks), dtype=torch.uint8, device=model.device)
    return buffers.kept
