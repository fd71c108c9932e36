"""The expert site of one layer: router, routed experts from their bytes, the shared expert.

Invariants: experts are added in ascending id in f32, one after the other, however the source
groups them; a dequantised expert lives until the next one and never outlives the layer's step.
On a GPU with the kernels for it, experts are not dequantised: see `routed_chunk.py`.
Source: model specification, section 3.7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.formats import FORMATS, fp4
from kernels.reference import router_logits as reference
from kernels.reference.route_select import route_select
from kernels.reference.swiglu import swiglu
from protocol.errors import ShardError
from protocol.files.model_config import ModelConfig
from protocol.files.slice_map import FP4

from .chunk_check import Pairs
from .highway import Row
from .matrix import ROW_BLOCKS, Matrix, linear
from .precision import Numerics
from .sources import ExpertMatrices
from .step import Step
from .weights import MoeWeights

if TYPE_CHECKING:
    from .routed_chunk import ChunkPlan


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

    def pairs(self, n_experts: int) -> Pairs:
        """Return what `ChunkCheck` compares."""
        counts = dict(zip(self.experts, map(len, self.tokens), strict=True))
        by_expert = [counts.get(expert, 0) for expert in range(n_experts)]
        return torch.cat(self.tokens), torch.cat(self.weights), by_expert


class Moe:
    """Router and experts of one layer."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: MoeWeights, numerics: Numerics
    ) -> None:
        self.config = config
        self.layer = layer
        self.weights = weights
        self.numerics = numerics

    def __call__(self, step: Step, row: Row) -> Tensor:
        """Return the site's output [T, H] in the activation dtype."""
        return self.sum(step, row, self.route(step, row))

    def route(self, step: Step, row: Row) -> Plan | ChunkPlan:
        """Return who picks whom. Where kernels run, nobody has waited for it yet."""
        logits = self._logits(row.x)
        picks, weights = self._picked(logits)
        self._note(step, picks, weights)
        plan = self._planned(row, picks, weights)
        if step.checks is not None:
            bias, scale = self.weights.bias, self.config.routed_scale
            pairs = plan.pairs(self.config.n_experts)
            step.checks.routes(self.layer, step.first, logits, bias, scale, picks, weights, pairs)
        return plan

    def _planned(self, row: Row, picks: Tensor, weights: Tensor) -> Plan | ChunkPlan:
        if not self._launches(row.x):
            return Plan(picks.long(), weights)
        from .routed_chunk import ChunkPlan  # noqa: PLC0415  imports Triton

        if picks.dtype != torch.int32:  # the best first
            picks, order = picks.sort(dim=1)
            picks, weights = picks.int(), weights.gather(1, order)
        return ChunkPlan(picks, weights, self.config.n_experts)

    def sum(self, step: Step, row: Row, plan: Plan | ChunkPlan) -> Tensor:
        """Return the picked experts' rows and the shared one's, added [T, H]."""
        if not isinstance(plan, Plan):
            return self._launched(step, row, plan)
        w, n = self.weights, self.numerics
        total = torch.zeros(row.x.shape, device=row.x.device)
        stream = step.experts.stream(self.layer, plan.experts)
        for number, (expert, matrices) in enumerate(stream):
            assert expert == plan.experts[number]
            gate_up, down = self._dequantise(expert, matrices)
            tokens = plan.tokens[number]
            y = self._expert(row.rounded[tokens], gate_up, down, plan.weights[number])
            total.index_add_(0, tokens, y.float())
        shared = self._expert(row.rounded, w.shared_gate_up, w.shared_down, None)
        return total.add_(shared.float()).to(n.activation)

    def _logits(self, x: Tensor) -> Tensor:
        """Return the router's logits [T, E] f32 of rows [T, H]."""
        if not x.is_cuda:
            return reference.router_logits(x, self.weights.router)
        from kernels.router_logits import router_logits  # noqa: PLC0415  imports Triton

        return router_logits(x, self.weights.router)

    def _picked(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's experts [T, K] and their weights; by kernels they ascend, i32."""
        config, bias = self.config, self.weights.bias
        top_k, scale = config.top_k, config.routed_scale
        if logits.is_cuda:
            from kernels.reference.route_m1 import MAX_EXPERTS, MAX_TOP_K  # noqa: PLC0415  as above
            from kernels.route_m1 import route_rows  # noqa: PLC0415

            if config.n_experts <= MAX_EXPERTS and top_k <= MAX_TOP_K:
                return route_rows(logits, bias, top_k=top_k, routed_scale=scale)
        return route_select(logits, bias, top_k, scale)

    def _launches(self, x: Tensor) -> bool:
        """Whether the routed experts go by kernels, which round their inputs."""
        formats = set(self.weights.formats)
        reads = formats == {FP4} or formats <= ROW_BLOCKS
        if not (x.is_cuda and self.numerics.rounds and reads):
            return False
        from kernels import device  # noqa: PLC0415  imports Triton

        has = device.has_warpgroup_products if formats == {FP4} else device.has_byte_products
        return has(x.device)

    def _launched(self, step: Step, row: Row, plan: ChunkPlan) -> Tensor:
        """Return the site's output by kernels."""
        from .routed_chunk import RoutedChunk  # noqa: PLC0415  as above

        # Launched before the plan is waited for: the device has it to do meanwhile.
        shared = self._launched_shared(row.rounded)
        limit, dtype = self.config.swiglu_limit, self.numerics.activation
        formats, checks, gemv_tokens = self.weights.formats, step.checks, step.gemv_tokens
        chunk = RoutedChunk(self.layer, row.x, plan, limit, dtype, formats, checks, gemv_tokens)
        return chunk.run(step.experts, shared)

    def _launched_shared(self, rounded: Tensor) -> Tensor:
        """Return the shared expert's rows [T, H]."""
        from kernels.swiglu import swiglu as launch  # noqa: PLC0415  as above

        w, n, limit = self.weights, self.numerics, self.config.swiglu_limit
        gate_up = linear(rounded, w.shared_gate_up, n.activation)
        shape = (gate_up.shape[0], gate_up.shape[1] // 2)
        out = torch.empty(shape, dtype=n.activation, device=gate_up.device)
        activated = launch(gate_up, limit, dtype=n.activation, rounds=n.rounds, out=out)
        return linear(activated, w.shared_down, n.activation)

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
        ascending, order = picks.long().sort(dim=1)
        step.record.picks.append(ascending)
        if step.record.full:
            step.record.weights.append(weights.gather(1, order))
