"""The expert site of one layer for one token, as launches. See `compute.model.moe`.

The shared expert and the site's coefficients run beside the routed experts on CUDA streams of their
own, each between two events.
Source: model specification, section 3.7.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compute.experts.tiers import ExpertTiers
from compute.model.highway import mix_settings
from compute.model.model import Model
from compute.model.weights import MoeWeights
from kernels.byte_planes import Planes
from kernels.formats.fp4_expert import Fp4Shape
from kernels.hc_collapse import hc_collapse_norm
from kernels.hc_expand import hc_expand
from kernels.hc_mix import hc_mix
from kernels.route_m1 import route_m1
from kernels.routed_m1 import routed_m1
from kernels.routed_m1_buffers import RoutedBuffers
from kernels.router_logits import router_logits
from kernels.swiglu import swiglu

from .look_ahead import LookAhead
from .products import product
from .side_stream import SideStream
from .step_buffers import StepBuffers


class ExpertsStep:
    """Fills the next streams from `middle`, and the layer's header.

    mixing   takes the site's coefficients, needed only at its end
    sharing  takes the shared expert
    ahead    routers of later layers, on `mixing` behind the coefficients; None: none
    """

    def __init__(
        self,
        model: Model,
        buffers: StepBuffers,
        tiers: ExpertTiers,
        mixing: SideStream,
        sharing: SideStream,
        ahead: LookAhead | None = None,
    ) -> None:
        config = self._config = model.config
        self._model = model
        self._buffers = buffers
        self._tiers = tiers
        self._dtype = model.numerics.activation
        self._mixing = mixing
        self._sharing = sharing
        self._ahead = ahead
        self._routed = {
            shape: RoutedBuffers.new(shape, config.top_k, model.device)
            for shape in set(tiers.shapes)
        }

        def f32(width: int) -> Tensor:
            return torch.zeros((1, width), dtype=torch.float32, device=model.device)

        # Buffers of their own: another CUDA stream writes them.
        width = config.expert_width * config.n_shared_experts
        self._gate_up, self._activated, self._shared = (
            f32(2 * width),
            f32(width),
            f32(config.hidden_size),
        )
        self._mix_settings = mix_settings(config)

    def run(self, layer: int, out: Tensor) -> None:
        """Launch the site; `out` takes the streams."""
        b, config = self._buffers, self._config
        weights = self._model.blocks[layer].weights
        streams, mix, moe = b.middle[layer], weights.ffn_mix, weights.moe
        mixed = (b.pre[layer + 1], b.post, b.comb)
        with self._mixing.fork():
            hc_mix(streams, mix.fn, mix.scale, mix.base, **self._mix_settings, out=mixed)
        hc_collapse_norm(
            streams, b.middle_pre[layer], weights.ffn_norm, config.norm_eps, self._dtype,
            out=b.row, rounded=b.rounded, planes=self._planes(layer),
        )  # fmt: skip
        with self._sharing.fork():
            self._share(moe)
        if self._ahead is not None:
            with self._mixing.fork():
                self._ahead.launch(layer)
        parts, pointers = self._route(layer, moe)
        self._sharing.join()
        self._mixing.join()
        present = pointers[2] if parts.dim() == 2 else None
        hc_expand(
            parts if parts.dim() == 2 else parts.view(1, -1), streams, b.post, b.comb,
            present=present, shared=self._shared, dtype=self._dtype, out=out,
        )  # fmt: skip

    def _route(self, layer: int, moe: MoeWeights) -> tuple[Tensor, Tensor]:
        """Return what each expert gave [K, H], or on the CPU their sum [H]; and the pointers."""
        b, config, tiers = self._buffers, self._config, self._tiers
        shape = tiers.shapes[layer]
        logits, pointers, weights = None, b.pointers, b.weights
        if b.routes is not None:
            kept = b.routes
            logits, pointers, weights = (
                kept.logits[layer],
                kept.pointers[layer],
                kept.weights[layer],
            )
        route_m1(
            router_logits(b.row, moe.router, out=logits),
            moe.bias,
            tiers.table[layer],
            tiers.addresses,
            tiers.offsets[layer],
            top_k=config.top_k,
            routed_scale=config.routed_scale,
            header=b.headers[layer],
            pointers=pointers,
            weights=weights,
        )
        parts = routed_m1(
            b.row, pointers, weights, shape, config.swiglu_limit,
            dtype=self._dtype, buffers=self._routed[shape], sums=False,
            row_given=self._planes(layer) is not None,
        )  # fmt: skip
        return parts, pointers

    def _planes(self, layer: int) -> Planes | None:
        """Where fp4 experts find their row; None where the kernel for them rounds it itself."""
        shape = self._tiers.shapes[layer]
        if not isinstance(shape, Fp4Shape):
            return None
        planes, offsets, scales = self._routed[shape].row
        return planes, offsets, scales

    def _share(self, moe: MoeWeights) -> None:
        product(self._buffers.rounded, moe.shared_gate_up, out=self._gate_up)
        limit = self._config.swiglu_limit
        swiglu(self._gate_up, limit, dtype=self._dtype, rounds=True, out=self._activated)
        product(self._activated, moe.shared_down, out=self._shared)
