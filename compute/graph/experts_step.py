"""The expert site of one layer for one token, as launches. See `compute.model.moe`.

The shared expert runs beside the routed ones on a CUDA stream of its own, between two events.
Source: model specification, section 3.7.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from compute.experts.tiers import ExpertTiers
from compute.model.model import Model
from compute.model.weights import MoeWeights
from kernels.hc_collapse import hc_collapse_norm
from kernels.hc_expand import hc_expand
from kernels.hc_mix import hc_mix
from kernels.route_m1 import route_m1
from kernels.routed_m1 import routed_m1
from kernels.routed_m1_buffers import RoutedBuffers
from kernels.swiglu import swiglu

from .products import product
from .step_buffers import StepBuffers


class ExpertsStep:
    """Fills the next streams from `middle`, and the layer's header.

    side_stream  whether the shared expert runs beside the routed ones
    """

    def __init__(
        self,
        model: Model,
        buffers: StepBuffers,
        tiers: ExpertTiers,
        *,
        side_stream: bool = True,
    ) -> None:
        config = self._config = model.config
        self._model = model
        self._buffers = buffers
        self._tiers = tiers
        self._dtype = model.numerics.activation
        self._side = SideStream(model.device) if side_stream else None
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
        self._mix_settings: dict[str, Any] = {
            "n_iterations": config.hc_sinkhorn_iters,
            "hc_eps": config.hc_eps,
            "norm_eps": config.norm_eps,
        }

    def run(self, layer: int, out: Tensor) -> None:
        """Launch the site; `out` takes the streams."""
        b, config = self._buffers, self._config
        weights = self._model.blocks[layer].weights
        streams, mix, moe = b.middle[layer], weights.ffn_mix, weights.moe
        mixed = (b.pre[layer + 1], b.post, b.comb)
        hc_mix(streams, mix.fn, mix.scale, mix.base, **self._mix_settings, out=mixed)
        hc_collapse_norm(
            streams, b.middle_pre[layer], weights.ffn_norm, config.norm_eps, self._dtype,
            out=b.row, rounded=b.rounded,
        )  # fmt: skip
        if self._side is None:
            self._share(moe)
            total = self._route(layer, moe)
        else:
            with self._side.fork():
                self._share(moe)
            total = self._route(layer, moe)
            self._side.join()
        hc_expand(
            total.view(1, -1), streams, b.post, b.comb,
            shared=self._shared, dtype=self._dtype, out=out,
        )  # fmt: skip

    def _route(self, layer: int, moe: MoeWeights) -> Tensor:
        b, config, tiers = self._buffers, self._config, self._tiers
        shape = tiers.shapes[layer]
        route_m1(
            product(b.row, moe.router),
            moe.bias,
            tiers.table[layer],
            tiers.addresses,
            tiers.offsets[layer],
            top_k=config.top_k,
            routed_scale=config.routed_scale,
            header=b.headers[layer],
            pointers=b.pointers,
            weights=b.weights,
        )
        return routed_m1(
            b.row, b.pointers, b.weights, shape, config.swiglu_limit,
            dtype=self._dtype, buffers=self._routed[shape],
        )  # fmt: skip

    def _share(self, moe: MoeWeights) -> None:
        product(self._buffers.rounded, moe.shared_gate_up, out=self._gate_up)
        limit = self._config.swiglu_limit
        swiglu(self._gate_up, limit, dtype=self._dtype, rounds=True, out=self._activated)
        product(self._activated, moe.shared_down, out=self._shared)


class SideStream:
    """A CUDA stream for work beside the current one; while a graph is recorded, another."""

    def __init__(self, device: torch.device) -> None:
        self._streams: list[torch.cuda.Stream] = []
        if device.type == "cuda":
            self._streams = [
                torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                for _ in range(2)
            ]

    def fork(self) -> AbstractContextManager[object]:
        """Launch what follows beside the current stream, after what it has launched so far."""
        if not self._streams:
            return nullcontext()
        stream = self._stream()
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    def join(self) -> None:
        """Let the current stream wait for what was forked."""
        if self._streams:
            torch.cuda.current_stream().wait_stream(self._stream())

    def _stream(self) -> torch.cuda.Stream:
        return self._streams[torch.cuda.is_current_stream_capturing()]
