"""The routed experts of a chunk by kernels, as the source gives them: on a GPU, from fp4 weights.

A chunk wants most experts of a layer, far more than a window of the daemon's stream holds, so the
site launches what it has and goes on asking. Invariants: experts launch together while at most
MOST_COPIES of them are copies in memory of their own; those that lie in the device cache share one
memory and only wait for the launch. A source copies on a CUDA stream of its own, so that the copies
of one launch run beside the products of the one before: copying once is cheaper than reading in
place, since every tile of an expert's pairs reads all of its bytes. Copies are dropped after the
launch that reads them: their memory is given out again in the stream's order. Each pair's output
has its place whatever launches together, and one sum at the end adds a token's in plan order.
Source: model specification, section 3.7.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from kernels.formats.fp4_expert import Fp4Shape
from kernels.routed_m1 import routed_m1
from kernels.routed_rows import routed_rows
from kernels.sum_parts import sum_parts
from protocol.errors import ShardError

from .sources import ExpertMatrices, ExpertSource

MOST_COPIES = 16  # as the daemon's window: twice that lives while both streams work
# Chunks of up to so many tokens may go through the kernels for one, token by token; for comparison,
# since tensor cores take one token's columns as fast and read a shared expert once.
GEMV_TOKENS = 0


class ChunkPlan:
    """A chunk's picks as pairs sorted by expert, then token."""

    def __init__(self, picks: Tensor, weights: Tensor, n_experts: int) -> None:
        """Sort picks [T, K] i32, ascending in a row, and their weights [T, K] f32."""
        flat = picks.flatten().long()
        order = flat.argsort(stable=True)
        self.tokens = (order // picks.shape[1]).int()  # [T * K]
        self.weights = weights.flatten()[order]
        places = torch.empty_like(order, dtype=torch.int32)
        places[order] = torch.arange(len(order), dtype=torch.int32, device=order.device)
        self.places = places.view(picks.shape)  # of a token's pairs, in plan order
        counts = torch.zeros(n_experts, dtype=torch.int32, device=order.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
        found: list[int] = counts.tolist()
        self.experts = [expert for expert, count in enumerate(found) if count]
        self.starts = [0, *accumulate(count for count in found if count)]


class RoutedChunk:
    """One layer's experts times one chunk's rows.

    x      [T, H], the site's input, not rounded
    limit  of the gate
    dtype  activations
    """

    def __init__(
        self, layer: int, x: Tensor, plan: ChunkPlan, limit: float, dtype: torch.dtype
    ) -> None:
        self._layer = layer
        self._x = x.contiguous()
        self._plan = plan
        self._limit = limit
        self._dtype = dtype
        self._shape: Fp4Shape | None = None
        self._held: list[ExpertMatrices] = []
        self._n_launched = 0
        self._parts = torch.empty((len(plan.tokens), x.shape[1]), dtype=dtype, device=x.device)

    def run(self, source: ExpertSource, shared: Tensor) -> Tensor:
        """Return [T, H] of activations: the picked experts' rows and the shared one's, added."""
        plan, most = self._plan, MOST_COPIES
        by_token = 0 < len(plan.places) <= GEMV_TOKENS
        memories: set[int] = set()
        for expert, matrices in source.stream(self._layer, plan.experts):
            self._hold(expert, matrices)
            memories.add(matrices.gate.untyped_storage().data_ptr())
            if len(memories) >= most and not by_token:
                self._launch()
                memories.clear()
        if by_token:
            return (self._sums_by_token() + shared.float()).to(self._dtype)
        self._launch()
        return sum_parts(self._parts, plan.places, shared, dtype=self._dtype)

    def _hold(self, expert: int, m: ExpertMatrices) -> None:
        """Keep an expert for the next launch. Raises ShardError where it is not as the others."""
        hidden, width = m.down.shape[0], m.gate.shape[0]
        offsets = [
            scale.data_ptr() - matrix.data_ptr()
            for matrix, scale in (
                (m.gate, m.gate_scale),
                (m.up, m.up_scale),
                (m.down, m.down_scale),
            )
        ]
        shape = Fp4Shape(hidden, width, *offsets)
        self._shape = self._shape or shape
        wanted = [(width, hidden // 2), (width, hidden // 32)] * 2
        wanted += [(hidden, width // 2), (hidden, width // 32)]
        found = [tuple(piece.shape) for piece in m]
        if shape != self._shape or hidden != self._x.shape[1] or found != wanted:
            raise ShardError(
                f"layer {self._layer} expert {expert}: pieces {found} at {offsets}, wanted "
                f"{wanted} for {self._x.shape[1]} channels, laid out as {self._shape}"
            )
        self._held.append(m)

    def _pointers(self) -> Tensor:
        """Return the addresses [3, G] of what is held."""
        addresses = [
            [m.gate.data_ptr() for m in self._held],
            [m.up.data_ptr() for m in self._held],
            [m.down.data_ptr() for m in self._held],
        ]
        host = torch.tensor(addresses, dtype=torch.int64)
        device = self._x.device
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host

    def _launch(self) -> None:
        """Launch what is held, then let go of it."""
        if not self._held:
            return
        assert self._shape is not None
        plan, end = self._plan, self._n_launched + len(self._held)
        starts = plan.starts[self._n_launched : end + 1]
        pairs = slice(starts[0], starts[-1])
        routed_rows(
            self._x, plan.tokens[pairs], plan.weights[pairs], [at - starts[0] for at in starts],
            self._pointers(), self._shape, self._limit, dtype=self._dtype, parts=self._parts[pairs],
        )  # fmt: skip
        self._n_launched = end
        self._held.clear()

    def _sums_by_token(self) -> Tensor:
        """Return each token's sum [T, H] f32; all experts are held."""
        assert self._shape is not None
        plan, pointers = self._plan, self._pointers()
        sums = torch.empty((len(plan.places), self._x.shape[1]), device=self._x.device)
        group = torch.repeat_interleave(
            torch.arange(len(plan.experts)), torch.tensor(plan.starts).diff()
        ).to(self._x.device)
        for token, places in enumerate(plan.places.long()):
            routed_m1(
                self._x[token : token + 1], pointers[:, group[places]].contiguous(),
                plan.weights[places], self._shape, self._limit, dtype=self._dtype,
                out=sums[token],
            )  # fmt: skip
        return sums
