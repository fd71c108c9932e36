"""The attention site of one layer for a chunk, as launches: what `attention.py` does with torch.

Window rows lie in a ring of the chunk's own, large enough that no row of it hides one that another
query sees; those that later chunks see go to the sequence's. Invariant: nothing waits for the
device. Source: model specification, sections 3.3 to 3.6.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels.attend_sparse import attend_sparse
from kernels.norm_latents import norm_latents
from kernels.round_fp8 import round_fp8
from protocol.files.model_config import ModelConfig

from .candidates import restricts
from .highway import Row
from .indexer import key_owner
from .matrix import grouped_linear, linear
from .precision import Numerics
from .rotary import RotaryTable
from .source_launches import SourceLaunches
from .step import Step
from .weights import AttentionWeights

MOST_SPLITS = 16  # programs that share the rows of one token's queries


class LaunchedAttention:
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
        self.vendor_decode_defect = vendor_decode_defect
        multiply = partial(linear, dtype=torch.float32)
        self.sources = SourceLaunches(config, layer, weights, numerics, multiply)

    def __call__(self, step: Step, row: Row) -> Tensor:
        """Return the site's output [T, H] in the activation dtype."""
        config, w, n = self.config, self.weights, self.numerics
        n_tokens, first = step.n_tokens, step.positions[:1]
        turns = self.rotary.table(step.end)
        ring = self._ring(step)
        qr = torch.empty((n_tokens, config.q_lora_rank), dtype=n.activation, device=step.device)
        norm_latents(
            linear(row.rounded, w.qa_kv, torch.float32), w.q_norm, w.kv_norm, first, turns,
            config.norm_eps, dtype=n.activation, rounds=n.rounds, ring=ring, qr=qr,
        )  # fmt: skip
        kept = ring.index_select(0, step.window_places.kept)
        step.sequence.windows[self.layer].index_copy_(0, step.kept_slots, kept)
        self._compress_and_choose(step, row.x, qr, turns)
        rows = None if self.kv_source is None else step.sequence.rows[self.kv_source]
        q = linear(qr, w.q_b, n.activation)
        out = attend_sparse(
            q, first, turns, ring, config.sliding_window, rows,
            None if rows is None else step.chosen, w.sink, dtype=n.activation,
            splits=_splits(n_tokens), out=torch.empty_like(q),
        )  # fmt: skip
        grouped = out.view(n_tokens, config.o_groups, -1)
        z = grouped_linear(grouped, w.o_a, n.activation).flatten(1)
        if n.rounds:
            z = round_fp8(z, out=torch.empty_like(z))
        return linear(z, w.o_b, n.activation)

    def _ring(self, step: Step) -> Tensor:
        """Return a ring [window + T - 1, k] that holds the older rows that the chunk sees."""
        window = step.sequence.windows[self.layer]
        shape = (len(window) + step.n_tokens - 1, window.shape[1])
        ring = torch.empty(shape, dtype=window.dtype, device=window.device)
        if len(step.older_slots):
            older = window.index_select(0, step.older_slots)
            ring.index_copy_(0, step.window_places.older, older)
        return ring

    def _compress_and_choose(self, step: Step, x: Tensor, qr: Tensor, turns: Tensor) -> None:
        config, sequence = self.config, step.sequence
        ratio = config.ratio(self.layer)
        if self.weights.compressor is not None:
            self.sources.write_rows(sequence, x, step.positions[:1], turns)
            if step.end // ratio > step.first // ratio:
                sequence.published_keys = self.layer
        if self.weights.index_q is None:
            return
        owner = key_owner(step, self.kv_source, defect=self.vendor_decode_defect)
        keys = sequence.keys[owner][: max(1, step.end // ratio)]
        if self.layer == config.candidate_source_layer:
            step.kept_blocks = None
            if restricts(len(keys), config):
                shape = (step.n_tokens, -(-len(keys) // config.candidate_block_size))
                step.kept_blocks = torch.empty(shape, dtype=torch.uint8, device=x.device)
        step.chosen = self.sources.choose(x, qr, step.positions, turns, keys, step.kept_blocks)
        if step.record is not None and step.record.full:
            step.record.selections[self.layer] = step.chosen.long()


def _splits(n_tokens: int) -> int:
    """Return a power of two, since each number of splits is compiled anew."""
    most = max(1, MOST_SPLITS // n_tokens)
    return 1 << (most.bit_length() - 1)
