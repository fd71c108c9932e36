"""A chunk's experts from GGUF blocks by kernels, beside what single tokens and torch give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from compute.model import routed_chunk
from compute.model.moe import dequantised
from compute.model.routed_chunk import ChunkPlan, RoutedChunk
from compute.model.sources import ExpertMatrices
from kernels.formats.k_expert import BlockShape
from kernels.reference.linear import linear
from kernels.reference.round_fp8 import round_fp8
from kernels.reference.swiglu import swiglu
from kernels.routed_m1_blocks import row_bytes
from protocol.errors import ShardError
from tests.support.block_experts import experts_of

LIMIT = 10.0
N_EXPERTS, TOP_K = 6, 3
MIXES = [("Q2_K", "Q2_K", "Q3_K"), ("Q4_K", "Q4_K", "Q4_K"), ("Q8_0", "Q8_0", "Q6_K")]


class Slots:
    """An ExpertSource of experts in slots."""

    def __init__(self, shape: BlockShape, device: str) -> None:
        self.shape = shape
        self.slots, pointers = experts_of(shape, N_EXPERTS, device)
        starts = (pointers[:, 0] - self.slots.data_ptr()).tolist()
        formats, rows = (
            (shape.gate, shape.up, shape.down),
            (shape.hidden, shape.hidden, shape.width),
        )
        lines = (shape.width, shape.width, shape.hidden)
        row_sizes = [row_bytes(name, k) for name, k in zip(formats, rows, strict=True)]
        self._pieces = list(zip(starts, lines, row_sizes, strict=True))

    def matrices(self, expert: int) -> ExpertMatrices:
        slot, none = self.slots[expert], torch.empty((0, 0), dtype=torch.uint8)
        gate, up, down = (slot[at : at + n * size].view(n, size) for at, n, size in self._pieces)
        none = none.to(slot.device)
        return ExpertMatrices(gate, none, up, none, down, none)

    def stream(self, layer: int, experts: Sequence[int]) -> Iterator[tuple[int, ExpertMatrices]]:
        for expert in experts:
            yield expert, self.matrices(expert)


class Case:
    def __init__(self, mix: tuple[str, str, str], n_tokens: int, device: str = "cpu") -> None:
        self.mix = mix
        self.source = Slots(BlockShape(512, 256, *mix), device)
        generator = torch.Generator().manual_seed(n_tokens)
        self.x = torch.randn(n_tokens, 512, generator=generator).to(device)
        scores = torch.rand(n_tokens, N_EXPERTS, generator=generator)
        self.picks = scores.topk(TOP_K, dim=1).indices.sort(dim=1).values.int().to(device)
        self.weights = torch.rand(n_tokens, TOP_K, generator=generator).to(device)

    def found(self, gemv_tokens: int = 0) -> Tensor:
        plan = ChunkPlan(self.picks, self.weights, N_EXPERTS)
        chunk = RoutedChunk(
            0, self.x, plan, LIMIT, torch.float32, self.mix, gemv_tokens=gemv_tokens
        )
        return chunk.run(self.source, torch.zeros_like(self.x)).cpu()

    def by_torch(self) -> Tensor:
        """The same from whole matrices, rows rounded to fp8, as a CPU does it."""
        total = torch.zeros(self.x.shape)
        for expert in range(N_EXPERTS):
            m = self.source.matrices(expert)
            pieces = zip(self.mix, (m.gate, m.up, m.down), strict=True)
            gate, up, down = (
                dequantised(name, piece.cpu(), m.gate_scale) for name, piece in pieces
            )
            tokens, places = torch.where(self.picks.cpu() == expert)
            x = round_fp8(self.x.cpu()[tokens])
            weights = self.weights.cpu()[tokens, places]
            gate, up = linear(x, gate, torch.float32), linear(x, up, torch.float32)
            activated = swiglu(gate, up, LIMIT, weights)
            total.index_add_(0, tokens, linear(round_fp8(activated), down, torch.float32))
        return total


def distance(found: Tensor, wanted: Tensor) -> float:
    return float(((found - wanted).norm(dim=1) / wanted.norm(dim=1)).max())


@pytest.mark.parametrize("mix", MIXES)
def test_chunks_are_near_single_tokens_and_near_torch(
    mix: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(mix, 20)
    found = case.found()
    for most in (1, 3):
        monkeypatch.setattr(routed_chunk, "MOST_COPIES", most)
        assert torch.equal(case.found(), found)
    by_token = case.found(gemv_tokens=20)
    # D4 rounds as single tokens are rounded, D2S6 with half as many scales.
    assert distance(found, by_token) < (0.03 if "Q2_K" in mix else 1e-5)
    # fp8, which torch's rows are rounded to, is coarser than both: they are about as far from it.
    wanted = case.by_torch()
    assert distance(found, wanted) < 0.15
    assert distance(found, wanted) < 1.3 * distance(by_token, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("n_tokens", [1, 9, 33, 200])
def test_chunks_on_a_gpu_are_those_of_the_cpu(
    mix: tuple[str, str, str], n_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(mix, n_tokens, "cuda")
    found, wanted = case.found(), Case(mix, n_tokens).found()
    assert distance(found, wanted) < 0.02  # a value on a rounding tie may fall the other way
    monkeypatch.setattr(routed_chunk, "MOST_COPIES", 1)
    assert torch.equal(case.found(), found)
    assert distance(found, case.found(gemv_tokens=200)) < 0.03


def test_pieces_of_another_format_are_refused() -> None:
    case = Case(MIXES[0], 9)
    case.mix = MIXES[1]
    with pytest.raises(ShardError, match=r"layer 0 expert 0: pieces .* wanted"):
        case.found()
