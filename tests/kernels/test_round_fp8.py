"""Rounding to fp8: the kernel against its reference, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.reference import round_fp8 as reference
from kernels.round_fp8 import round_fp8
from tests.support.row_cases import row_cases

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def same_bits(found: Tensor, wanted: Tensor) -> bool:
    return torch.equal(found.cpu().view(torch.int32), wanted.view(torch.int32))


@pytest.mark.parametrize(("device", "n_tokens"), row_cases())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_equal_the_reference(device: str, n_tokens: int, dtype: torch.dtype) -> None:
    k = (160, 32, 96, 64, 512)[n_tokens % 5]
    generator = torch.Generator().manual_seed(n_tokens * k)
    x = torch.randn(n_tokens, k, generator=generator) * torch.logspace(-38, 37, n_tokens)[:, None]
    x[0, :7] = torch.tensor([0.0, -0.0, 448.0, -448.0, 1e-30, -1e-30, 1e-4])
    x = x.to(dtype)
    out = torch.full((n_tokens, k), float("nan"), device=device)
    found = round_fp8(x.to(device), out=out)
    assert found.data_ptr() == out.data_ptr()
    assert same_bits(found, reference.round_fp8(x))


@pytest.mark.parametrize("device", DEVICES)
def test_every_tie_and_every_step_of_the_grid_rounds_as_the_reference(device: str) -> None:
    # Around each half step of E4M3, over all binades and both signs, next to the group's largest.
    eighths = torch.arange(64).view(1, -1) * 0.125 + 8.0
    binades = torch.pow(2.0, torch.arange(-20.0, 6.0)).view(-1, 1)
    x = (eighths * binades).flatten()
    x = torch.stack([x, -x, torch.nextafter(x, x * 2), torch.nextafter(x, x * 0)]).view(-1, 8)
    x = torch.cat([x, torch.full((len(x), 24), 448.0)], dim=1)
    assert same_bits(round_fp8(x.to(device)), reference.round_fp8(x))


@pytest.mark.parametrize("device", DEVICES)
def test_values_are_rounded_to_bf16_before_where_that_is_said(device: str) -> None:
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(3))
    out = torch.full_like(x, float("nan")).to(device)
    round_fp8(x.to(device), dtype=torch.bfloat16, out=out)
    assert same_bits(out, reference.round_fp8(x.bfloat16()))


@pytest.mark.gpu
def test_what_is_no_number_comes_out_as_in_the_reference() -> None:
    x = torch.randn(4, 64)
    x[0, 3], x[1, 40], x[2, 7], x[2, 8] = torch.nan, torch.inf, -torch.inf, 0.0
    found, wanted = round_fp8(x.cuda()).cpu(), reference.round_fp8(x)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="x is"):
        round_fp8(torch.zeros(1, 33))
    with pytest.raises(ValueError, match="contiguous"):
        round_fp8(torch.zeros(64, 32).T)
    with pytest.raises(ValueError, match=r"out \("):
        round_fp8(torch.zeros(1, 32), out=torch.zeros(1, 64))
