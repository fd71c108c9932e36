"""Compressed rows, index keys and the choice of rows as launches, for one token or a chunk.

Only kv sources write rows and keys, only index sources choose. As `compressor.py` and `indexer.py`
do it with torch. Invariants: a token's choice does not depend on how many tokens a step has, nor on
how many of them are scored at once; nothing waits for the device.
Source: model specification, sections 3.4 to 3.6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.index_keys import index_keys
from kernels.index_queries import index_queries
from kernels.index_scores import index_scores
from kernels.pool_latents import pool_latents
from kernels.select_blocks import select_blocks
from kernels.select_rows import select_rows
from protocol.files.model_config import ModelConfig

from .candidates import restricts
from .matrix import Matrix
from .precision import Numerics
from .sequence import Sequence
from .weights import AttentionWeights

MOST_SCORES = 1 << 27  # at once: half a GiB


@dataclass(frozen=True, slots=True)
class SourceLaunches:
    """What a source layer launches beside its attention.

    multiply  rows [T, k] times a matrix: [T, n] f32, not rounded
    """

    config: ModelConfig
    layer: int
    weights: AttentionWeights
    numerics: Numerics
    multiply: Callable[[Tensor, Matrix], Tensor]

    def write_rows(self, sequence: Sequence, x: Tensor, first: Tensor, turns: Tensor) -> None:
        """Write the rows and keys of the groups that close within the step.

        x      [T, H], the site's input as it is
        first  [1] i64 on the device, the position of its first row
        turns  [P, r / 2, 2] f32, of `RotaryTable.table`
        """
        w, layer, eps = self.weights.compressor, self.layer, self.config.norm_eps
        assert w is not None
        ratio, group = self.config.ratio(layer), sequence.open_groups.get(layer)
        dtype, rounds = self.numerics.activation, self.numerics.rounds
        latent = pool_latents(
            self.multiply(x, w.kv_gate), first, ratio,
            None if group is None else group.kv, None if group is None else group.scores,
            w.norm, turns, sequence.rows[layer], eps, dtype=dtype, rounds=rounds,
        )  # fmt: skip
        index_keys(
            self.multiply(latent, w.key), first, len(x), ratio, w.key_norm, turns,
            sequence.keys[layer], eps, dtype=dtype, rounds=rounds,
        )  # fmt: skip

    def choose(
        self,
        x: Tensor,
        qr: Tensor,
        positions: Tensor,
        turns: Tensor,
        keys: Tensor,
        kept: Tensor | None,
        selection: Tensor | None = None,
    ) -> Tensor:
        """Return the rows [T, index_top_k] i32 of each query, ascending, -1 at the end.

        qr         [T, q rank], rounded
        positions  [T] i64 on the device
        keys       [G, k]: no token of the step sees more
        kept       [T, blocks] u8, the step's candidate blocks: the candidate source fills them, the
                   sources after it choose within them; None where none is ever left out
        """
        config, n_tokens, n_groups = self.config, len(x), len(keys)
        if kept is not None and not restricts(n_groups, config):
            kept = None
        is_source = self.layer == config.candidate_source_layer and kept is not None
        scored: Callable[[slice, Tensor], None] | None = None
        if n_groups > config.index_top_k or is_source:  # else every visible row is chosen
            scored = self._scorer(x, qr, positions, turns, keys)
        if selection is None:
            shape = (n_tokens, config.index_top_k)
            selection = torch.empty(shape, dtype=torch.int32, device=x.device)
        for part in _parts(n_tokens, n_groups):
            scores = torch.empty((part.stop - part.start, n_groups), device=x.device)
            if scored is not None:
                scored(part, scores)
            first = positions[part.start : part.start + 1]
            self._select(scores, first, None if kept is None else kept[part], selection[part])
        return selection

    def _select(
        self, scores: Tensor, first: Tensor, kept: Tensor | None, selection: Tensor
    ) -> None:
        """Choose the rows of some tokens, as many as have scores; `first` is their first one's."""
        config, ratio, dtype = self.config, self.config.ratio(self.layer), self.numerics.activation
        size, source = config.candidate_block_size, config.candidate_source_layer
        if kept is not None and self.layer == source:
            top = config.candidate_top_blocks
            select_blocks(scores, first, ratio, size, top, dtype=dtype, kept=kept)
        select_rows(
            scores, first, ratio, config.index_top_k,
            blocks=kept if self.layer > source >= 0 else None,
            block_size=size, dtype=dtype, selection=selection,
        )  # fmt: skip

    def _scorer(
        self, x: Tensor, qr: Tensor, positions: Tensor, turns: Tensor, keys: Tensor
    ) -> Callable[[slice, Tensor], None]:
        """Return what fills the scores of some tokens."""
        w, n, ratio = self.weights, self.numerics, self.config.ratio(self.layer)
        assert w.index_q is not None
        assert w.index_heads is not None
        queries = index_queries(
            self.multiply(qr, w.index_q), positions[:1], turns,
            dim=self.config.index_head_dim, dtype=n.activation, rounds=n.rounds,
        )  # fmt: skip
        heads = self.multiply(x, w.index_heads)

        def fill(part: slice, scores: Tensor) -> None:
            first = positions[part.start : part.start + 1]
            index_scores(
                queries[part], heads[part], keys, first, ratio, dtype=n.activation, scores=scores
            )

        return fill


def _parts(n_tokens: int, n_groups: int) -> list[slice]:
    """Cut the tokens so that no more than MOST_SCORES are held at once."""
    # Even: each part's position lies where the kernels were compiled for, at 16 bytes.
    size = max(2, MOST_SCORES // max(n_groups, 1) // 2 * 2)
    return [slice(at, min(at + size, n_tokens)) for at in range(0, n_tokens, size)]
