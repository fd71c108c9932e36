"""The routed experts of a chunk by kernels, as the source gives them: on a GPU, as they are stored.

A chunk wants most experts of a layer, far more than a window of the daemon's stream holds, so the
site launches what it has and goes on asking. Invariants: experts launch together while at most
MOST_COPIES of them are copies in memory of their own; those that lie in the device cache share one
memory, and a source that knows where they are is not asked for them one by one. A source copies on
a CUDA stream of its own, so that the copies of one launch run beside the products of the one
before: copying once is cheaper than reading in place, since every tile of an expert's pairs reads
all of its bytes. Copies are dropped after the launch that reads them: their memory is given out
again in the stream's order. Each pair's output has its place whatever launches together, and one
sum at the end adds a token's in plan order.
Source: model specification, section 3.7.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from kernels.formats.fp4_expert import Fp4Shape
from kernels.formats.k_expert import BlockShape
from kernels.plan_pairs import plan_pairs
from kernels.routed_m1 import routed_m1
from kernels.routed_m1_blocks import row_bytes
from kernels.routed_rows import routed_rows
from kernels.sum_parts import sum_parts
from protocol.errors import ShardError
from protocol.files.slice_map import FP4

from .chunk_check import ChunkCheck, Pairs
from .sources import ExpertMatrices, ExpertSource, ResidentSource, SlotsSource

MOST_COPIES = 16  # as the daemon's window: twice that lives while both streams work


class ChunkPlan:
    """A chunk's picks as pairs sorted by expert, then token.

    The host waits for the device once, when it first asks which experts were picked.
    """

    def __init__(self, picks: Tensor, weights: Tensor, n_experts: int) -> None:
        """Sort picks [T, K] i32, ascending in a row, and their weights [T, K] f32.

        Raises ShardError for a pick that is no expert, on a GPU once the host has `counts`.
        """
        if not picks.is_cuda:
            self._check(int(((picks >= 0) & (picks < n_experts)).sum()), picks.numel())
        self._n_pairs = picks.numel()
        # Pairs' tokens [T * K] and weights, and the places [T, K] of a token's pairs in plan order.
        self.tokens, self.weights, self.places, counts = plan_pairs(picks, weights, n_experts)
        self._counts, self._arrived = counts, None
        if counts.is_cuda:
            self._counts = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
            self._counts.copy_(counts, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    @cached_property
    def counts(self) -> list[int]:
        """How many pairs each expert has; what was launched after the plan goes on meanwhile."""
        if self._arrived is not None:
            self._arrived.synchronize()
        found: list[int] = self._counts.tolist()
        self._check(sum(found), self._n_pairs)
        return found

    def pairs(self, _n_experts: int) -> Pairs:
        """Return what `ChunkCheck` compares."""
        return self.tokens, self.weights, self.counts

    @staticmethod
    def _check(n_found: int, n_pairs: int) -> None:
        if n_found != n_pairs:
            raise ShardError(
                f"{n_pairs - n_found} of a chunk's {n_pairs} picks are no experts; "
                "check the weights of its router"
            )

    @cached_property
    def experts(self) -> list[int]:
        """The experts that were picked, ascending."""
        return [expert for expert, count in enumerate(self.counts) if count]

    @cached_property
    def starts(self) -> list[int]:
        """Where each picked expert's pairs begin, and where the last one's end."""
        return [0, *accumulate(count for count in self.counts if count)]


class RoutedChunk:
    """One layer's experts times one chunk's rows.

    x            [T, H], the site's input, not rounded
    limit        of the gate
    dtype        activations
    formats      of gate, up and down
    checks       is shown the addresses that the kernels were given, and where the experts are
    gemv_tokens  chunks of up to so many tokens go through the kernels for one, token by token: to
                 compare, since tensor cores take few columns as fast and read an expert once for
                 all tokens that picked it
    """

    def __init__(
        self,
        layer: int,
        x: Tensor,
        plan: ChunkPlan,
        limit: float,
        dtype: torch.dtype,
        formats: tuple[str, str, str] = (FP4, FP4, FP4),
        checks: ChunkCheck | None = None,
        gemv_tokens: int = 0,
    ) -> None:
        self._layer = layer
        self._x = x.contiguous()
        self._plan = plan
        self._limit = limit
        self._dtype = dtype
        self._formats = formats
        self._checks = checks
        self._by_token = 0 < len(plan.places) <= gemv_tokens
        self._shape: Fp4Shape | BlockShape | None = None
        # Of gate, up and down of each of the plan's experts; 0: not there yet.
        self._addresses = np.zeros((3, len(plan.experts)), np.int64)
        self._held: dict[int, ExpertMatrices] = {}  # by expert, until their launch
        self._n_launched = 0
        self._parts = torch.empty((len(plan.tokens), x.shape[1]), dtype=dtype, device=x.device)

    def run(self, source: ExpertSource, shared: Tensor) -> Tensor:
        """Return [T, H] of activations: the picked experts' rows and the shared one's, added."""
        plan, most = self._plan, MOST_COPIES
        memories: set[int] = set()
        others = self._take_residents(source)
        for expert, matrices in source.stream(self._layer, others) if others else ():
            place = bisect_left(plan.experts, expert)
            self._hold(place, expert, matrices)
            memories.add(matrices.gate.untyped_storage().data_ptr())
            if len(memories) >= most and not self._by_token:
                self._launch(source, place + 1)
                memories.clear()
        if self._by_token:
            return (self._sums_by_token(source) + shared.float()).to(self._dtype)
        self._launch(source, len(plan.experts))
        return sum_parts(self._parts, plan.places, shared, dtype=self._dtype)

    def _take_residents(self, source: ExpertSource) -> list[int]:
        """Note where experts lie that the device holds; return the others."""
        experts = self._plan.experts
        if not isinstance(source, ResidentSource):
            return experts
        starts, offsets, shapes = source.resident(self._layer, experts)
        found = starts > 0
        if found.any():
            self._agree(experts[int(found.argmax())], offsets, shapes)
            for row, offset in zip(self._addresses, offsets[::2], strict=True):
                row[found] = starts[found] + offset
        return [expert for expert, there in zip(experts, found.tolist(), strict=True) if not there]

    def _hold(self, place: int, expert: int, m: ExpertMatrices) -> None:
        """Keep an expert for the next launch. Raises ShardError where it is not as the others."""
        addresses = [piece.data_ptr() for piece in m]
        offsets = [address - addresses[0] for address in addresses]
        self._agree(expert, offsets, [tuple(piece.shape) for piece in m])
        self._addresses[:, place] = addresses[::2]
        self._held[expert] = m

    def _agree(
        self, expert: int, offsets: Sequence[int], shapes: Sequence[tuple[int, ...]]
    ) -> None:
        """Raise ShardError unless an expert's pieces are of one shape and lie as all others'."""
        shape, wanted = _layout(self._formats, shapes[4][0], shapes[0][0], offsets)
        self._shape = self._shape or shape
        if shape != self._shape or shape.hidden != self._x.shape[1] or list(shapes) != wanted:
            raise ShardError(
                f"layer {self._layer} expert {expert}: pieces {list(shapes)} at {list(offsets)}, "
                f"wanted {wanted} for {self._x.shape[1]} channels, laid out as {self._shape}"
            )

    def _pointers(self, end: int) -> Tensor:
        """Return the addresses [3, G] of what is launched next, up to the plan's expert `end`."""
        host = torch.from_numpy(self._addresses[:, self._n_launched : end].copy())
        device = self._x.device
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host

    def _compare(self, source: ExpertSource, given: Tensor, experts: Sequence[int]) -> None:
        """Compare addresses [3, G] that a launch was given with where these G experts are."""
        if self._checks is None:
            return
        wanted = torch.zeros((3, len(experts)), dtype=torch.int64)
        for place, expert in enumerate(experts):
            found = self._held.get(expert)
            if found is None and isinstance(source, SlotsSource):
                found = source.held(self._layer, expert)
            if found is not None:
                wanted[:, place] = torch.tensor([piece.data_ptr() for piece in found[::2]])
        self._checks.pointers(self._layer, experts, given, wanted)

    def _launch(self, source: ExpertSource, end: int) -> None:
        """Launch the plan's experts up to `end`, then let go of their copies."""
        if end == self._n_launched:
            return
        assert self._shape is not None
        plan = self._plan
        starts = plan.starts[self._n_launched : end + 1]
        pairs, pointers = slice(starts[0], starts[-1]), self._pointers(end)
        self._compare(source, pointers, plan.experts[self._n_launched : end])
        routed_rows(
            self._x, plan.tokens[pairs], plan.weights[pairs], [at - starts[0] for at in starts],
            pointers, self._shape, self._limit, dtype=self._dtype,
            parts=self._parts[pairs],
        )  # fmt: skip
        self._n_launched = end
        self._held.clear()

    def _sums_by_token(self, source: ExpertSource) -> Tensor:
        """Return each token's sum [T, H] f32; all experts are held."""
        assert self._shape is not None
        plan, places = self._plan, self._plan.places.long()
        sums = torch.empty((len(places), self._x.shape[1]), device=self._x.device)
        group = torch.repeat_interleave(
            torch.arange(len(plan.experts)), torch.tensor(plan.starts).diff()
        ).to(self._x.device)
        pointers = self._pointers(len(plan.experts))[:, group[places.flatten()]]
        if self._checks is not None:
            pairs = places.flatten().tolist()
            experts = [plan.experts[bisect_right(plan.starts, pair) - 1] for pair in pairs]
            self._compare(source, pointers, experts)
        for token, own in enumerate(pointers.view(3, *places.shape).unbind(1)):
            routed_m1(
                self._x[token : token + 1], own.contiguous(),
                plan.weights[places[token]], self._shape, self._limit, dtype=self._dtype,
                out=sums[token],
            )  # fmt: skip
        return sums


def _layout(
    formats: tuple[str, str, str], hidden: int, width: int, offsets: Sequence[int]
) -> tuple[Fp4Shape | BlockShape, list[tuple[int, ...]]]:
    """Return how an expert with pieces at `offsets` lies, and the shapes that its pieces have."""
    if set(formats) == {FP4}:
        above = [(width, hidden // 2), (width, hidden // 32)] * 2
        gate, gate_scale, up, up_scale, down, down_scale = offsets
        shape = Fp4Shape(hidden, width, gate_scale - gate, up_scale - up, down_scale - down)
        return shape, [*above, (hidden, width // 2), (hidden, width // 32)]
    rows = [(width, hidden), (width, hidden), (hidden, width)]
    pieces: list[tuple[int, ...]] = []
    for name, (n, k) in zip(formats, rows, strict=True):
        pieces += [(n, row_bytes(name, k)), (0, 0)]
    return BlockShape(hidden, width, *formats), pieces
