"""The Engram before some blocks as launches, for one token or a chunk. See `engram.py`.

Source: model specification, section 3.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.engram_gate import engram_gate
from kernels.engram_rows import engram_rows
from kernels.formats import FORMATS
from kernels.round_fp8 import round_fp8
from protocol.files.model_config import ModelConfig
from protocol.files.slice_map import ROW_E4M3

from .engram import Engram
from .matrix import linear
from .precision import Numerics
from .step import Step
from .weights import EngramWeights

_READ_BY_THE_KERNEL = frozenset({ROW_E4M3, "Q8_0", "Q2_K"})


class LaunchedEngram(Engram):
    """One table's update; a byte that is no number gives NaN, where `Engram` raises."""

    def __call__(self, step: Step, streams: Tensor) -> Tensor:
        """Return the streams [T, S, H] with this table's gated values added."""
        n, w = self.numerics, self.weights
        data = step.rows.take(step.engram_handles[self.table])
        values = stored_values(data, w, self.config, n, n.activation)
        kv = linear(values, w.kv, n.activation)
        eps = self.config.norm_eps
        return engram_gate(streams.contiguous(), kv, w.weight, eps, dtype=n.activation)


def stored_values(
    data: Tensor, weights: EngramWeights, config: ModelConfig, numerics: Numerics, kind: torch.dtype
) -> Tensor:
    """Return each token's rows one after the other [T, columns * k] `kind`, rounded.

    data  [T * columns, bytes] u8
    kind  f32 or the activation dtype, which holds the values exactly
    """
    columns, dim, name = config.engram_columns, config.engram_head_dim, weights.row_format
    dtype, rounds = numerics.activation, numerics.rounds
    shape = (len(data) // columns, columns * dim)
    if name in _READ_BY_THE_KERNEL:
        out = torch.empty(shape, dtype=kind, device=data.device)
        return engram_rows(
            data, dim, dtype=dtype, rounds=rounds, row_format=name, columns=columns, out=out
        )
    values = FORMATS[name].dequantise(data[:, : weights.row_bytes]).to(dtype).view(shape)
    return (round_fp8(values) if rounds else values).to(kind)
