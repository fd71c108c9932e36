"""The attention site of one layer for one token, as launches. See `compute.model.attention`.

Source: model specification, sections 3.3 to 3.6.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from compute.model.highway import mix_settings
from compute.model.model import Model
from compute.model.sequence import Sequence
from kernels.attend_sparse import attend_sparse
from kernels.hc_collapse import hc_collapse_norm
from kernels.hc_expand import hc_expand
from kernels.hc_mix import hc_mix
from kernels.norm_latents import norm_latents
from kernels.round_fp8 import round_fp8

from .index_step import IndexStep
from .products import product
from .side_stream import SideStream
from .step_buffers import StepBuffers

SPLITS = 10  # of ring and selection: one block of rows a program
WINDOW_SPLITS = 2


class AttentionStep:
    """Fills `middle` of its layer from its streams.

    mixing  takes the site's coefficients, needed only at its end
    """

    def __init__(
        self,
        model: Model,
        layer: int,
        sequence: Sequence,
        buffers: StepBuffers,
        turns: Mapping[str, Tensor],
        mixing: SideStream,
    ) -> None:
        config = self._config = model.config
        self._layer = layer
        self._weights = model.blocks[layer].weights
        self._buffers = buffers
        self._mixing = mixing
        self._numerics = model.numerics
        self._ring = sequence.windows[layer]
        self._turns = turns["yarn" if config.ratio(layer) else "plain"]
        self._index = IndexStep(model, layer, sequence, buffers, self._turns)
        source = config.kv_source(layer)
        self._rows = None if source is None else sequence.rows[source]
        chooser = config.index_source(layer)
        self._selection = None if chooser is None else buffers.selections[chooser]
        self._mix_settings = mix_settings(config)

    def run(self) -> None:
        """Launch the site."""
        b, w, n = self._buffers, self._weights, self._numerics
        layer, eps = self._layer, self._config.norm_eps
        streams, mix = b.streams[layer], w.attention_mix
        out = (b.middle_pre[layer], b.post, b.comb)
        with self._mixing.fork():
            hc_mix(streams, mix.fn, mix.scale, mix.base, **self._mix_settings, out=out)
        attention = w.attention
        hc_collapse_norm(
            streams, b.pre[layer], w.attention_norm, eps, n.activation,
            out=b.row, rounded=b.rounded,
        )  # fmt: skip
        qr = norm_latents(
            product(b.rounded, attention.qa_kv),
            attention.q_norm,
            attention.kv_norm,
            b.first,
            self._turns,
            eps,
            dtype=n.activation,
            rounds=True,
            ring=self._ring,
        )
        self._index.run(b.row, qr)
        q = product(qr, attention.q_b)
        attended = attend_sparse(
            q,
            b.first,
            self._turns,
            self._ring,
            self._config.sliding_window,
            self._rows,
            self._selection,
            attention.sink,
            dtype=n.activation,
            splits=WINDOW_SPLITS if self._selection is None else SPLITS,
        )
        z = round_fp8(product(attended, attention.o_a), dtype=n.activation)
        y = product(z, attention.o_b)
        self._mixing.join()
        hc_expand(y, streams, b.post, b.comb, dtype=n.activation, out=b.middle[layer])
