"""The attention site of one layer: window ring, compressed rows, sink, grouped output.

Keys and values are one shared row a position. This is torch, for the CPU: on a GPU
`launched_attention.py` does the same by kernels. Source: model specification, section 3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.attend import attend
from kernels.reference.rms_norm import rms_norm
from kernels.reference.rotate import rotate
from protocol.files.model_config import ModelConfig

from .compressor import Compressor
from .highway import Row
from .indexer import Indexer
from .matrix import grouped_linear, linear
from .precision import Numerics
from .rotary import RotaryTable
from .step import Step
from .weights import AttentionWeights


class Attention:
    """Attention of one layer; its state lives in the step's sequence."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        weights: AttentionWeights,
        numerics: Numerics,
        rotary: RotaryTable,
        *,
        vendor_decode_defect: bool = False,
    ) -> None:
        self.config = config
        self.layer = layer
        self.weights = weights
        self.numerics = numerics
        self.rotary = rotary
        self.kv_source = config.kv_source(layer)
        self.compressor = None
        if weights.compressor is not None:
            self.compressor = Compressor(config, layer, weights.compressor, numerics, rotary)
        self.indexer = None
        if weights.index_q is not None and weights.index_heads is not None:
            self.indexer = Indexer(
                config,
                layer,
                weights.index_q,
                weights.index_heads,
                numerics,
                vendor_decode_defect=vendor_decode_defect,
            )

    def __call__(self, step: Step, row: Row) -> Tensor:
        """Return the site's output [T, H] in the activation dtype."""
        config, weights, n = self.config, self.weights, self.numerics
        turns = self.rotary.turns(step.first, step.n_tokens)
        projected = linear(row.rounded, weights.qa_kv, n.activation)
        qr, kv = torch.split(projected, [config.q_lora_rank, config.head_dim], dim=1)
        qr = n.round_input(rms_norm(qr, weights.q_norm, config.norm_eps, n.activation))
        q = linear(qr, weights.q_b, n.activation)
        kv = rotate(rms_norm(kv, weights.kv_norm, config.norm_eps, n.activation), turns)
        window = self._extend_window(step, n.round_window(kv).to(n.activation))
        self._compress_and_select(step, row.x.float(), qr, turns)  # here both share the cast
        turned = rotate(q.view(-1, config.n_heads, config.head_dim), turns)
        out = rotate(self._attend(step, turned, window), turns.conj())
        grouped = out.view(step.n_tokens, config.o_groups, -1)
        z = grouped_linear(grouped, weights.o_a, n.activation).flatten(1)
        return linear(n.round_input(z), weights.o_b, n.activation)

    def _extend_window(self, step: Step, rows: Tensor) -> Tensor:
        """Return the older window rows and the new ones, oldest first; put the new in the ring.

        The older are read before the new ones overwrite them.
        """
        ring = step.sequence.windows[self.layer]
        window = torch.cat([ring.index_select(0, step.older_slots), rows])
        ring.index_copy_(0, step.kept_slots, rows[step.kept_from :])
        return window

    def _compress_and_select(self, step: Step, x: Tensor, qr: Tensor, turns: Tensor) -> None:
        if self.compressor is not None:
            self.compressor(step, x)
        if self.indexer is not None:
            step.selection = self.indexer(step, x, qr, turns)
            if step.record is not None and step.record.full:
                visible = step.visible_groups(self.config.ratio(self.layer))
                listed = step.selection.listed(visible, self.config.index_top_k)
                step.record.selections[self.layer] = listed

    def _attend(self, step: Step, q: Tensor, window: Tensor) -> Tensor:
        """Return [T, heads, k]: each tile over its window rows, then its selected rows."""
        outputs = []
        for i, tile in enumerate(step.tiles):
            rows, visible = window[tile.rows], tile.visible
            if self.kv_source is not None:
                assert step.selection is not None
                selected = step.selection.tiles[i]
                rows = torch.cat([rows, selected.take(step.sequence.rows[self.kv_source])])
                if visible is not None and selected.visible is not None:
                    visible = torch.cat([visible, selected.visible], dim=1)
            sink = self.weights.sink
            tile_q = q[tile.first : tile.end]
            outputs.append(attend(tile_q, rows, sink, visible, self.numerics.activation))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
