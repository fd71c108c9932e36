"""The attention site of one layer: window ring, compressed rows, sink, grouped output.

Keys and values are one shared row a position. Source: model specification, section 3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.attend import attend
from kernels.reference.rms_norm import rms_norm
from kernels.reference.rotate import rotate
from protocol.files.model_config import ModelConfig

from .compressor import Compressor
from .indexer import Indexer
from .matrix import grouped_linear, linear
from .precision import Numerics
from .rotary import RotaryTable
from .step import Step
from .weights import AttentionWeights

MOST_QUERIES = 1024  # of one launch: queries and results are f32 there
MOST_SPLITS = 16  # programs that share the rows of one token's queries


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

    def __call__(self, step: Step, x: Tensor) -> Tensor:
        """Return the site's output [T, H] for x [T, H], both in the activation dtype."""
        config, weights, n = self.config, self.weights, self.numerics
        turns = self.rotary.turns(step.first, step.n_tokens)
        projected = linear(n.round_input(x), weights.qa_kv, n.activation)
        qr, kv = torch.split(projected, [config.q_lora_rank, config.head_dim], dim=1)
        qr = n.round_input(rms_norm(qr, weights.q_norm, config.norm_eps, n.activation))
        q = linear(qr, weights.q_b, n.activation)
        kv = rotate(rms_norm(kv, weights.kv_norm, config.norm_eps, n.activation), turns)
        window = self._extend_window(step, n.round_window(kv).to(n.activation))
        self._compress_and_select(step, x, qr, turns)
        if self._launches(q):
            out = self._launched(step, q, window)
        else:
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
        if not x.is_cuda:  # there bf16 rows take tensor cores; here both sites share the cast
            x = x.float()
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

    def _launches(self, q: Tensor) -> bool:
        """Whether a kernel attends: with bf16 rows it takes tensor cores, where torch has f32."""
        return q.is_cuda and q.dtype == torch.bfloat16

    def _launched(self, step: Step, q: Tensor, window: Tensor) -> Tensor:
        """Return [T, heads * k] of q [T, heads * k], not turned yet: each query over its rows."""
        from kernels.attend_sparse import attend_sparse  # noqa: PLC0415  imports Triton

        n_tokens, size = step.n_tokens, self.config.sliding_window
        n_slots = size + n_tokens - 1
        ring = torch.empty((n_slots, window.shape[1]), dtype=q.dtype, device=q.device)
        positions = torch.arange(step.end - len(window), step.end, device=q.device)
        ring.index_copy_(0, positions % n_slots, window)
        rows, selection = self._selected(step)
        out = torch.empty_like(q)
        for first in range(0, n_tokens, MOST_QUERIES):
            part = slice(first, first + MOST_QUERIES)
            out[part] = attend_sparse(
                q[part].float(),
                torch.full((1,), step.first + first, device=q.device),
                self.rotary.table(step.end),
                ring,
                size,
                rows,
                None if selection is None else selection[part],
                self.weights.sink,
                dtype=q.dtype,
                splits=max(1, MOST_SPLITS // n_tokens),
            )
        return out

    def _selected(self, step: Step) -> tuple[Tensor | None, Tensor | None]:
        """Return the compressed rows and which of them each query sees [T, S] i32, -1 = none."""
        if self.kv_source is None:
            return None, None
        assert step.selection is not None
        ratio = self.config.ratio(self.layer)
        most = min(self.config.index_top_k, step.end // ratio)
        if most == 0:
            return None, None
        listed = step.selection.listed(step.visible_groups(ratio), most)
        return step.sequence.rows[self.kv_source], listed.int().contiguous()
