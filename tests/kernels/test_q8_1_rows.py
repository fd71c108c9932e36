"""Rows rounded to eight bits: the kernel against its reference, the reference against its words."""

from __future__ import annotations

import pytest
import torch

from kernels import q8_1_rows
from kernels.reference import q8_1_rows as reference
from tests.support.extreme_rows import extreme_rows
from tests.support.row_cases import row_cases


@pytest.mark.parametrize(("device", "rows"), row_cases())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_equal_their_reference_bit_for_bit(device: str, rows: int, dtype: torch.dtype) -> None:
    k = (160, 288, 32, 64, 128)[rows % 5]
    x = extreme_rows(rows, k, dtype)
    out = q8_1_rows.empty_rows(rows, k, torch.device(device))
    out[0].fill_(-1)
    out[1].fill_(-1)
    found = q8_1_rows.q8_1_rows(x.to(device), out=out)
    assert found[0] is out[0]
    for found_part, wanted in zip(found, reference.q8_1_rows(x), strict=True):
        assert torch.equal(found_part.cpu(), wanted)


def test_codes_times_scales_are_within_half_a_step_and_sums_are_the_codes_sums() -> None:
    x = torch.randn(3, 160, generator=torch.Generator().manual_seed(1))
    codes, sides = reference.q8_1_rows(x)
    scales = reference.row_scales(sides, 5)
    error = (reference.dequantise(codes, sides, 160) - x).abs().view(3, 5, 32).amax(-1)
    assert bool((error <= 0.5001 * scales).all())
    assert torch.equal(
        reference.row_sums(sides, 5),
        reference.in_order(codes, 160).reshape(3, 10, 16).int().sum(-1).int(),
    )
    assert codes.abs().amax() == 127


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="x is"):
        q8_1_rows.q8_1_rows(torch.zeros(1, 33))
    with pytest.raises(ValueError, match=r"out\[0\] "):
        q8_1_rows.q8_1_rows(
            torch.zeros(1, 32), out=q8_1_rows.empty_rows(1, 160, torch.device("cpu"))
        )
