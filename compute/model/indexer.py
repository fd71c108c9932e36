"""The choice of compressed rows, made by the index sources.

Source: model specification, section 3.5; the defect switch, section 9, trap 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.index_scores import index_scores
from kernels.reference.rotate import rotate
from kernels.reference.select_rows import select_rows
from protocol.files.model_config import ModelConfig

from .candidates import candidate_blocks, mask_scores, restricts
from .matrix import Matrix, linear
from .precision import Numerics
from .selection import Selection, select_all, select_listed
from .step import Step


class Indexer:
    """The indexer of one index source; its keys are those of its kv source."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        query: Matrix,
        head_weights: Matrix,
        numerics: Numerics,
        *,
        vendor_decode_defect: bool,
    ) -> None:
        source = config.kv_source(layer)
        assert source is not None
        self.config = config
        self.layer = layer
        self.ratio = config.ratio(layer)
        self.kv_source = source
        self.query = query
        self.head_weights = head_weights
        self.numerics = numerics
        self.vendor_decode_defect = vendor_decode_defect
        self.is_candidate_source = layer == config.candidate_source_layer
        self.uses_candidates = layer > config.candidate_source_layer >= 0

    def __call__(self, step: Step, x: Tensor, qr: Tensor, turns: Tensor) -> Selection:
        """Choose the rows of each query. x [T, H], qr [T, q rank] f32 rounded, turns [T, r/2].

        Scores are not needed where all visible rows are selected and no block is left out.
        """
        config = self.config
        n_rows = step.end // self.ratio
        visible = step.visible_groups(self.ratio)
        narrows = self.is_candidate_source and restricts(n_rows, config)
        scores = None
        if n_rows > config.index_top_k or narrows:
            scores = self._scores(step, x, qr, turns, n_rows)
        if self.is_candidate_source:
            step.candidates = None
            if scores is not None:
                step.candidates = candidate_blocks(scores, visible, config)
        if scores is None or n_rows <= config.index_top_k:
            return select_all(step.cuts, visible, step.most_visible(self.ratio))
        if self.uses_candidates and step.candidates is not None:
            scores = mask_scores(scores, step.candidates, config)
        chosen = select_rows(scores, visible, config.index_top_k)
        return select_listed(step.cuts, chosen, n_rows)

    def _scores(self, step: Step, x: Tensor, qr: Tensor, turns: Tensor, n_rows: int) -> Tensor:
        """Return the scores [T, n_rows] f32 of all closed groups; those not visible are no use."""
        config, n = self.config, self.numerics
        heads, dim = config.index_n_heads, config.index_head_dim
        queries = linear(qr, self.query, n.activation).view(-1, heads, dim)
        queries = n.round_index(rotate(queries, turns))
        owner = key_owner(step, self.kv_source, defect=self.vendor_decode_defect)
        keys = step.sequence.keys[owner][:n_rows]
        weights = linear(x, self.head_weights, n.activation) * (dim**-0.5 * heads**-0.5)
        tiles = [
            index_scores(queries[t.first : t.end], keys, weights[t.first : t.end])
            for t in step.tiles
        ]
        return torch.cat(tiles)


def key_owner(step: Step, kv_source: int | None, *, defect: bool) -> int:
    """Return the source of the keys to score; with the defect, the last that closed a group."""
    if defect and step.sequence.published_keys is not None:
        return step.sequence.published_keys
    assert kv_source is not None
    return kv_source
