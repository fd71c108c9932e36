"""The expert site of one layer: router, routed experts from their bytes, the shared expert.

Invariants: experts are added in ascending id in f32, one after the other, however the source
groups them; a dequantised expert lives until the next one and never outlives the layer's step.
On a GPU with the kernels for it, experts are not dequantised: see `routed_chunk.py`.
Source: model specification, section 3.7.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.formats import FORMATS, fp4
from kernels.reference.route_select import route_select
from kernels.reference.swiglu import swiglu
from protocol.errors import ShardError
from protocol.files.model_config import ModelConfig
from protocol.files.slice_map import FP4

from .matrix import ROW_BLOCKS, Matrix, linear
from .precision import Numerics
from .sources import ExpertMatrices
from .step import Step
from .weights import MoeWeights


def dequantised(name: str, packed: Tensor, scales: Tensor) -> Tensor:
    """Return a matrix [out, in] f32 of its bytes [out, n] u8, in the format that a layout names.

    scales  of "FP4" [out, in / 32] u8; a block format has them among its values
    """
    return fp4.dequantise(packed, scales) if name == FP4 else FORMATS[name].dequantise(packed)


class Plan:
    """The picks of a step grouped by expert, ascending: the order of summation."""

    def __init__(self, picks: Tensor, weights: Tensor) -> None:
        """Group picks [T, K] int64 and their weights [T, K] f32."""
        order = picks.flatten().argsort(stable=True)
        experts, counts = torch.unique_consecutive(picks.flatten()[order], return_counts=True)
        self.experts: list[int] = experts.tolist()
        tokens, sizes = order // picks.shape[1], counts.tolist()
        self.tokens = torch.split(tokens, sizes)  # an expert: [n] int64, ascending
        self.weights = torch.split(weights.flatten()[order], sizes)  # an expert: [n] f32


class Moe:
    """Router and experts of one layer."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: MoeWeights, numerics: Numerics
    ) -> None:
        self.config = config
        self.layer = layer
        self.weights = weights
        self.numerics = numerics

    def __call__(self, step: Step, x: Tensor) -> Tensor:
        """Return the site's output [T, H] for x [T, H], both in the activation dtype."""
        config, w, n = self.config, self.weights, self.numerics
        logits = linear(x, w.router, torch.float32)
        if self._launches(x):
            return self._launched(step, x, logits)
        picks, weights = route_select(logits, w.bias, config.top_k, config.routed_scale)
        self._note(step, picks, weights)
        plan = Plan(picks, weights)
        rounded = n.round_input(x)
        total = torch.zeros_like(rounded)
        stream = step.experts.stream(self.layer, plan.experts)
        for number, (expert, matrices) in enumerate(stream):
            assert expert == plan.experts[number]
            gate_up, down = self._dequantise(expert, matrices)
            tokens = plan.tokens[number]
            y = self._expert(rounded[tokens], gate_up, down, plan.weights[number])
            total.index_add_(0, tokens, y.float())
        shared = self._expert(rounded, w.shared_gate_up, w.shared_down, None)
        return total.add_(shared.float()).to(n.activation)

    def _launches(self, x: Tensor) -> bool:
        """Whether the routed experts go by kernels, which round their inputs."""
        rounds = self.numerics.round_input is not Tensor.float
        formats = set(self.weights.formats)
        if not (x.is_cuda and rounds and (formats == {FP4} or formats <= ROW_BLOCKS)):
            return False
        from kernels.device import has_warpgroup_products, speaks_ptx  # noqa: PLC0415  Triton

        return has_warpgroup_products(x.device) if formats == {FP4} else speaks_ptx(x.device)

    def _launched(self, step: Step, x: Tensor, logits: Tensor) -> Tensor:
        """Return the site's output by kernels."""
        from kernels.reference.route_m1 import MAX_EXPERTS, MAX_TOP_K  # noqa: PLC0415  as above
        from kernels.route_m1 import route_rows  # noqa: PLC0415

        from .routed_chunk import ChunkPlan, RoutedChunk  # noqa: PLC0415

        config, w, n = self.config, self.weights, self.numerics
        if config.n_experts <= MAX_EXPERTS and config.top_k <= MAX_TOP_K:
            picks, weights = route_rows(
                logits, w.bias, top_k=config.top_k, routed_scale=config.routed_scale
            )
        else:
            ranked, weights = route_select(logits, w.bias, config.top_k, config.routed_scale)
            picks, order = ranked.sort(dim=1)
            weights = weights.gather(1, order)
        self._note(step, picks.long(), weights)
        plan = ChunkPlan(picks, weights, config.n_experts)
        shared = self._expert(n.round_input(x), w.shared_gate_up, w.shared_down, None)
        limit = config.swiglu_limit
        chunk = RoutedChunk(self.layer, x, plan, limit, n.activation, w.formats)
        return chunk.run(step.experts, shared)

    def _expert(self, x: Tensor, gate_up: Matrix, down: Matrix, weight: Tensor | None) -> Tensor:
        """Return y [n, H] of one expert; the weight acts before the down projection's rounding."""
        n = self.numerics
        gate, up = linear(x, gate_up, n.activation).chunk(2, dim=1)
        activated = swiglu(gate, up, self.config.swiglu_limit, weight).to(n.activation)
        return linear(n.round_input(activated), down, n.activation)

    def _dequantise(self, expert: int, m: ExpertMatrices) -> tuple[Tensor, Tensor]:
        """Return gate over up [2 * width, H] and down [H, width], f32."""
        gate, up, down = self.weights.formats
        try:
            below = dequantised(down, m.down, m.down_scale)
            if gate == up:
                packed, scales = torch.cat([m.gate, m.up]), torch.cat([m.gate_scale, m.up_scale])
                return dequantised(gate, packed, scales), below
            above = dequantised(gate, m.gate, m.gate_scale), dequantised(up, m.up, m.up_scale)
            return torch.cat(above), below
        except ValueError as error:
            raise ShardError(f"layer {self.layer} expert {expert}: {error}") from None

    def _note(self, step: Step, picks: Tensor, weights: Tensor) -> None:
        if step.record is None:
            return
        ascending, order = picks.sort(dim=1)
        step.record.picks.append(ascending)
        if step.record.full:
            step.record.weights.append(weights.gather(1, order))
