"""One layer: Engram where it has one, then attention and experts on the residual streams.

Source: model specification, section 3.0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from protocol.files.model_config import ModelConfig

from .attention import Attention
from .engram import Engram
from .highway import Row, add, mix, read_row
from .moe import Moe
from .precision import Numerics
from .rotary import RotaryTable
from .step import Step
from .weights import LayerWeights

if TYPE_CHECKING:
    from .launched_attention import LaunchedAttention


class Block:
    """One layer of the model.

    launches  whether its chunks go by kernels, as on a GPU, or by torch
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        weights: LayerWeights,
        numerics: Numerics,
        rotary: RotaryTable,
        *,
        vendor_decode_defect: bool = False,
        launches: bool = False,
    ) -> None:
        self.config = config
        self.layer = layer
        self.weights = weights
        self.numerics = numerics
        attention, engram = _parts(launches=launches)
        self.engram = None
        if weights.engram is not None:
            self.engram = engram(config, layer, weights.engram, numerics)
        self.attention = attention(
            config,
            layer,
            weights.attention,
            numerics,
            rotary,
            vendor_decode_defect=vendor_decode_defect,
        )
        self.moe = Moe(config, layer, weights.moe, numerics)

    def __call__(self, step: Step, streams: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
        """Return streams [T, S, H] after the layer and the pre-mix [T, S] for the next one.

        A sublayer collapses with the pre-mix of the sublayer BEFORE it.
        """
        w = self.weights
        if self.engram is not None:
            streams = self.engram(step, streams)
        site = mix(streams, w.attention_mix, self.config)
        y = self.attention(step, self._read(streams, pre, w.attention_norm))
        streams, pre = add(y, streams, site), site.pre
        row = self._read(streams, pre, w.ffn_norm)
        plan = self.moe.route(step, row)
        # Launched before the plan is waited for: the device has it to do meanwhile.
        site = mix(streams, w.ffn_mix, self.config)
        y = self.moe.sum(step, row, plan)
        streams, pre = add(y, streams, site), site.pre
        if step.record is not None and step.record.full:
            step.record.streams.append(streams)
            step.record.pre.append(pre)
        return streams, pre

    def _read(self, streams: Tensor, pre: Tensor, norm: Tensor) -> Row:
        return read_row(streams, pre, norm, self.config.norm_eps, self.numerics)


def _parts(*, launches: bool) -> tuple[type[Attention | LaunchedAttention], type[Engram]]:
    """Return what attends and what adds Engram rows: by torch, or by kernels."""
    if not launches:
        return Attention, Engram
    from .launched_attention import LaunchedAttention  # noqa: PLC0415  Triton takes long to import
    from .launched_engram import LaunchedEngram  # noqa: PLC0415  as above

    return LaunchedAttention, LaunchedEngram
