"""Rows rounded for tensor cores: the kernel against its reference, the reference against facts."""

from __future__ import annotations

import pytest
import torch

from kernels import tiled_rows
from kernels.reference import q8_1_rows
from kernels.reference import tiled_rows as reference
from tests.support.extreme_rows import extreme_rows
from tests.support.row_cases import row_cases

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("device", "rows"), row_cases())
@pytest.mark.parametrize("form", sorted(reference.GROUPS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_equal_their_reference_bit_for_bit(
    device: str, form: str, rows: int, dtype: torch.dtype
) -> None:
    k = (160, 288, 32, 64, 1280)[rows % 5]
    x = extreme_rows(rows, k, dtype)
    out = tiled_rows.empty_rows(rows, k, form, torch.device(device))
    for part in out:
        part.fill_(-1)
    found = tiled_rows.tiled_rows(x.to(device), form, out=out)
    assert found is out
    for found_part, wanted in zip(found, reference.tiled_rows(x, form), strict=True):
        assert torch.equal(found_part.cpu(), wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", sorted(reference.GROUPS))
def test_rows_may_be_chosen_and_zeros_follow(device: str, form: str) -> None:
    x = torch.randn(5, 160, generator=torch.Generator().manual_seed(4))
    tokens = torch.tensor([4, 0, 4, 2], dtype=torch.int32)
    found = tiled_rows.tiled_rows(x.to(device), form, tokens.to(device), spare=3)
    wanted = reference.tiled_rows(x[tokens.long()], form)
    for found_part, part in zip(found, wanted, strict=True):
        assert torch.equal(found_part[:4].cpu(), part)
        assert found_part.shape[0] == 7
        assert not found_part[4:].any()


@pytest.mark.parametrize("form", sorted(reference.GROUPS))
def test_codes_times_scales_are_within_half_a_step(form: str) -> None:
    x = torch.randn(3, 160, generator=torch.Generator().manual_seed(1))
    rows = reference.tiled_rows(x, form)
    padded = torch.nn.functional.pad(x, (0, 96))
    error = (reference.dequantise(rows, 256) - padded).abs()
    error = error.view(3, -1, reference.GROUPS[form]).amax(-1)
    assert bool((error <= 0.5001 * rows.scales).all())
    assert rows.codes.abs().amax() == 127
    assert not rows.codes[:, 160:].any()


def test_d4_rounds_as_rows_for_single_tokens_are_rounded() -> None:
    x = torch.randn(3, 320, generator=torch.Generator().manual_seed(2))
    rows, others = reference.tiled_rows(x, "D4"), q8_1_rows.q8_1_rows(x)
    assert torch.equal(rows.codes[:, :320], q8_1_rows.in_order(others[0], 320))
    assert torch.equal(rows.scales[:, :10], q8_1_rows.row_scales(others[1], 10))


def test_sums_are_of_values_in_six_of_eight_groups_of_d2s6_and_else_of_codes() -> None:
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(3))
    of_values = x.double().view(3, 2, 8, 16).sum(-1)
    for form, n_of_values in (("D4", 0), ("D2S6", 6)):
        rows = reference.tiled_rows(x, form)
        of_codes = reference.dequantise(rows, 256).view(3, 2, 8, 16).sum(-1)
        wanted = torch.cat([of_values[..., :n_of_values], of_codes[..., n_of_values:]], -1)
        assert torch.allclose(rows.sums.double().view(3, 2, 8), wanted, rtol=1e-6, atol=1e-5)


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="x is"):
        tiled_rows.tiled_rows(torch.zeros(1, 33), "D4")
    with pytest.raises(ValueError, match="form"):
        tiled_rows.tiled_rows(torch.zeros(1, 32), "D5")
    with pytest.raises(ValueError, match="tokens"):
        tiled_rows.tiled_rows(torch.zeros(1, 32), "D4", torch.zeros(1))
    out = tiled_rows.empty_rows(1, 160, "D4", torch.device("cpu"))
    with pytest.raises(ValueError, match=r"out\.codes"):
        tiled_rows.tiled_rows(torch.zeros(1, 32), "D4", out=out)
