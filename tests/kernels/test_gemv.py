"""A few rows times one stored matrix: kernels against their reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import gemv
from kernels.formats import fp8
from kernels.reference import gemv as reference

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
SHAPES = [(32, 256, 1), (96, 160, 1), (128, 96, 2), (40, 32, 1), (64, 32, 1)]
SHAPES += [(96, 64, 2), (40, 32, 5), (6, 32, 2)]  # groups that end within a row of tiles


def stored(n: int, k: int, *, fp8_tiles: bool) -> tuple[Tensor, Tensor | None]:
    values = torch.randn(n, k, generator=torch.Generator().manual_seed(n * k))
    return fp8.quantise_tiles(values) if fp8_tiles else (values.bfloat16(), None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("fp8_tiles", [True, False])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(("n", "k", "groups"), SHAPES)
def test_products_equal_the_reference(
    device: str, rows: int, n: int, k: int, groups: int, *, fp8_tiles: bool, plain: bool
) -> None:
    weight, scales = stored(n, k, fp8_tiles=fp8_tiles)
    x = torch.randn(rows, groups * k, generator=torch.Generator().manual_seed(rows))
    out = torch.full((rows, n), float("nan"), device=device)
    found = gemv.gemv(
        x.to(device), weight.to(device), None if scales is None else scales.to(device),
        groups=groups, plain=plain, out=out,
    )  # fmt: skip
    assert found is out
    wanted = reference.gemv(x.double().float(), weight, scales, groups)
    assert (found.cpu() - wanted).norm() <= 1e-6 * wanted.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_every_code_and_extreme_scales_are_read_exactly(device: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes[(codes & 127) == 127] = 0  # not numbers
    weight = codes.repeat_interleave(32).view(256, 32)
    scales = torch.tensor([0, 1, 110, 127, 128, 200, 246, 120], dtype=torch.uint8).view(8, 1)
    x = torch.zeros(1, 32)
    x[0, 5] = 1.0
    found = gemv.gemv(x.to(device), weight.to(device), scales.to(device))
    assert torch.equal(found.cpu(), reference.gemv(x, weight, scales, 1))


@pytest.mark.gpu
def test_very_many_short_rows_take_each_its_own_scale() -> None:
    weight, scales = stored(96_000, 64, fp8_tiles=True)
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    assert scales is not None
    found = gemv.gemv(x.cuda(), weight.cuda(), scales.cuda()).cpu()
    wanted = reference.gemv(x, weight, scales, 1)
    assert (found - wanted).norm() <= 1e-6 * wanted.norm()


@pytest.mark.gpu
def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    weight, scales = stored(1280, 5120, fp8_tiles=True)
    x = torch.randn(8, 5120).cuda()
    assert scales is not None
    together = gemv.gemv(x, weight.cuda(), scales.cuda())
    for row in range(8):
        alone = gemv.gemv(x[row : row + 1].contiguous(), weight.cuda(), scales.cuda())
        assert torch.equal(alone[0], together[row])


def test_what_does_not_fit_is_refused() -> None:
    weight, scales = stored(64, 64, fp8_tiles=True)
    with pytest.raises(ValueError, match="x is"):
        gemv.gemv(torch.zeros(1, 32), weight, scales)
    with pytest.raises(ValueError, match="rows"):
        gemv.gemv(torch.zeros(9, 64), weight, scales)
    with pytest.raises(ValueError, match="out is"):
        gemv.gemv(torch.zeros(1, 64), weight, scales, out=torch.zeros(2, 64))
    with pytest.raises(ValueError, match="scales are"):
        gemv.gemv(torch.zeros(1, 64), weight, torch.zeros(1, 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match="weight is"):
        gemv.gemv(torch.zeros(1, 64), weight)
