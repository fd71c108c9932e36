"""The routed experts of many rows over GGUF blocks: kernels against their reference."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernels.formats.k_expert import BlockShape
from kernels.reference import routed_m1 as single
from kernels.reference import routed_rows as reference
from kernels.reference.sum_parts import sum_parts
from kernels.routed_rows import routed_rows
from tests.support.block_experts import experts_of

LIMIT = 10.0
MIXES = {
    "q2k-q3k": ("Q2_K", "Q2_K", "Q3_K"),
    "q4k": ("Q4_K", "Q4_K", "Q4_K"),
    "q8_0": ("Q8_0", "Q8_0", "Q8_0"),
    "mixed": ("Q2_K", "Q4_K", "Q6_K"),
}
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


class Case:
    """Pairs of a few groups, on the CPU and on a device."""

    def __init__(
        self, shape: BlockShape, sizes: Sequence[int], n_tokens: int, size: float = 1.0
    ) -> None:
        self.shape = shape
        self.slots, self.pointers = experts_of(shape, len(sizes), "cpu")
        generator = torch.Generator().manual_seed(sum(sizes))
        self.x = size * torch.randn(n_tokens, shape.hidden, generator=generator)
        chosen = [torch.randperm(n_tokens, generator=generator)[:size] for size in sizes]
        self.tokens = torch.cat([tokens.sort().values for tokens in chosen]).int()
        self.weights = torch.rand(sum(sizes), generator=generator)
        self.starts = [sum(sizes[:group]) for group in range(len(sizes) + 1)]

    def wanted(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return reference.routed_rows(
            self.x, self.tokens, self.weights, self.starts, self.pointers, self.shape, LIMIT, dtype
        )

    def pointers_to(self, slots: Tensor) -> Tensor:
        moved = self.pointers - self.slots.data_ptr() + slots.data_ptr()
        return torch.where(self.pointers == 0, 0, moved).to(slots.device)

    def found(
        self, device: str, dtype: torch.dtype = torch.float32, *, plain: bool = False
    ) -> Tensor:
        slots = self.slots.to(device)
        parts = torch.full(
            (len(self.tokens), self.shape.hidden), float("nan"), dtype=dtype, device=device
        )
        found = routed_rows(
            self.x.to(device), self.tokens.to(device), self.weights.to(device), self.starts,
            self.pointers_to(slots), self.shape, LIMIT, dtype=dtype, parts=parts, plain=plain,
        )  # fmt: skip
        assert found is parts
        return found.cpu()


def assert_close(found: Tensor, wanted: Tensor, tolerance: float = 3e-3) -> None:
    # An activation is rounded between the products: a tie may fall the other way.
    assert wanted.norm() > 0
    assert (found - wanted).norm() <= tolerance * wanted.norm()
    rows = (found - wanted).norm(dim=1) <= 10 * tolerance * wanted.norm(dim=1)
    assert bool(rows.all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("mix", "hidden", "width", "sizes"),
    [
        ("q2k-q3k", 256, 256, [9, 1, 0, 33]),
        ("q4k", 256, 256, [2, 0, 17]),
        ("q8_0", 96, 32, [1, 2, 8, 9, 0, 33]),
        ("mixed", 256, 256, [8, 1]),
    ],
)
def test_parts_equal_the_reference(
    device: str, mix: str, hidden: int, width: int, sizes: Sequence[int]
) -> None:
    case = Case(BlockShape(hidden, width, *MIXES[mix]), sizes, 35)
    assert_close(case.found(device), case.wanted())


@pytest.mark.gpu
@pytest.mark.parametrize("mix", sorted(MIXES))
@pytest.mark.parametrize(("hidden", "width"), [(256, 256), (768, 512), (5120, 2304)])
@pytest.mark.parametrize("size", [1.0, 300.0])
def test_parts_of_groups_of_all_sizes_equal_the_reference(
    mix: str, hidden: int, width: int, size: float
) -> None:
    sizes = [1, 2, 8, 9, 33, 16, 64, 65, 200] if hidden < 5120 else [33, 70]
    case = Case(BlockShape(hidden, width, *MIXES[mix]), sizes, 200, size)
    assert_close(case.found("cuda"), case.wanted())
    found, wanted = case.found("cuda", torch.bfloat16), case.wanted(torch.bfloat16)
    assert_close(found.float(), wanted.float(), 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("mix", sorted(MIXES))
def test_parts_of_any_number_of_pairs_equal_the_reference(mix: str) -> None:
    case = Case(BlockShape(512, 256, *MIXES[mix]), range(1, 34), 40)
    assert_close(case.found("cuda"), case.wanted())


@pytest.mark.gpu
@pytest.mark.parametrize("mix", sorted(MIXES))
def test_both_bodies_give_the_same_bits(mix: str) -> None:
    case = Case(BlockShape(512, 256, *MIXES[mix]), [1, 8, 33, 70], 80)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(case.found("cuda", dtype), case.found("cuda", dtype, plain=True))


@pytest.mark.parametrize("device", DEVICES)
def test_clamps_bf16_and_absent_experts(device: str) -> None:
    case = Case(BlockShape(256, 256, *MIXES["q2k-q3k"]), [3, 2, 4], 6, 200.0)
    case.pointers[:, 1] = 0
    wanted = case.wanted(torch.bfloat16).float()
    found = case.found(device, torch.bfloat16).float()
    assert (wanted[3:5] == 0).all()
    assert torch.equal(found[3:5], wanted[3:5])
    assert_close(found[[0, 1, 2, 5, 6, 7, 8]], wanted[[0, 1, 2, 5, 6, 7, 8]], 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("mix", sorted(MIXES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_depends_on_its_pair_alone(mix: str, dtype: torch.dtype) -> None:
    case = Case(BlockShape(768, 512, *MIXES[mix]), [1, 8, 33, 64, 130], 130)
    whole = case.found("cuda", dtype)
    assert torch.equal(case.found("cuda", dtype), whole)
    slots = case.slots.cuda()
    for group, (first, end) in enumerate(pairwise(case.starts)):
        for start in range(first, end, 13):
            stop = min(end, start + 13)
            found = routed_rows(
                case.x.cuda(), case.tokens[start:stop].cuda(), case.weights[start:stop].cuda(),
                [0, stop - start], case.pointers_to(slots)[:, group : group + 1].contiguous(),
                case.shape, LIMIT, dtype=dtype,
            )  # fmt: skip
            assert torch.equal(found.cpu(), whole[start:stop])


@pytest.mark.parametrize("mix", sorted(MIXES))
def test_the_reference_is_near_what_single_tokens_give(mix: str) -> None:
    case = Case(BlockShape(256, 256, *MIXES[mix]), [1, 1, 1], 1)
    wanted = single.routed_m1(case.x, case.pointers, case.weights, case.shape, LIMIT, torch.float32)
    places = torch.arange(3, dtype=torch.int32).view(1, 3)
    found = sum_parts(case.wanted(), places, None, torch.float32)[0]
    # Only D2S6 rounds otherwise than single tokens are rounded.
    tolerance = 3e-2 if "Q2_K" in MIXES[mix] else 1e-5
    assert (found - wanted).norm() <= tolerance * wanted.norm()


def test_formats_without_kernels_and_rows_of_part_blocks_are_refused() -> None:
    case = Case(BlockShape(256, 256, *MIXES["q4k"]), [2, 1], 3)
    for shape, words in (
        (BlockShape(256, 256, "Q5_K", "Q5_K", "Q5_K"), "format"),
        (BlockShape(256, 32, "Q2_K", "Q2_K", "Q3_K"), "whole blocks"),
    ):
        with pytest.raises(ValueError, match=words):
            routed_rows(case.x, case.tokens, case.weights, case.starts, case.pointers, shape, LIMIT)
