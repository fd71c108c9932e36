"""Picks sorted into pairs: the kernel against its reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.plan_pairs import plan_pairs
from kernels.reference import plan_pairs as reference
from tests.support.row_cases import ROWS

# tokens, experts, picks of a token
SIZES = [(1, 32, 6), (2, 8, 1), (5, 7, 7), (8, 45, 3), (9, 12, 8), (33, 384, 6)]
MORE = [(700, 12, 3), (8, 384, 6), (9, 1024, 16), (2048, 384, 6), (8192, 384, 6)]
MORE += [(n, 45, 3) for n in range(1, ROWS[-1] + 1)]
CASES = [pytest.param("cpu", size, marks=pytest.mark.interpreter) for size in SIZES]
CASES += [pytest.param("cuda", size, marks=pytest.mark.gpu) for size in [*SIZES, *MORE]]


def picked(n_tokens: int, n_experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n_tokens)
    # Few experts take most picks, and some take none.
    scores = torch.rand(n_tokens, n_experts, generator=generator) * torch.rand(n_experts) ** 4
    picks = scores.topk(top_k, dim=1).indices.sort(dim=1).values.int()
    return picks, torch.rand(n_tokens, top_k, generator=generator)


@pytest.mark.parametrize(("device", "sizes"), CASES)
def test_pairs_equal_the_reference(device: str, sizes: tuple[int, int, int]) -> None:
    picks, weights = picked(*sizes)
    wanted = reference.plan_pairs(picks, weights, sizes[1])
    found = plan_pairs(picks.to(device), weights.to(device), sizes[1])
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.cpu(), other)


def test_what_a_plan_says() -> None:
    picks, weights = picked(40, 9, 4)
    tokens, by_pair, places, counts = plan_pairs(picks, weights, 9)
    assert torch.equal(tokens[places.long()], torch.arange(40).int().unsqueeze(1).expand(-1, 4))
    assert torch.equal(by_pair[places.long()], weights)
    assert torch.equal(counts, torch.bincount(picks.flatten(), minlength=9).int())
    with pytest.raises(ValueError, match="plan_pairs"):
        plan_pairs(picks.long(), weights, 9)


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.interpreter),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("wrong", [-1, 9, 99, -(2**31), 2**31 - 1])
def test_the_kernel_counts_no_pick_that_is_no_expert(device: str, wrong: int) -> None:
    picks = torch.tensor([[2, 5], [wrong, 7]], dtype=torch.int32, device=device)
    weights = torch.ones((2, 2), device=device)
    counts = plan_pairs(picks, weights, 9)[3]
    assert counts.tolist() == [0, 0, 1, 0, 0, 1, 0, 1, 0]
