"""A few rows times one stored matrix: kernels against their reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bench.step import MATRICES
from kernels import gemv
from kernels.formats import fp8
from kernels.gemv_layouts import tiling, unroll
from kernels.reference import gemv as reference
from tests.support.row_cases import apart, row_cases

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
SHAPES = [(32, 256, 1), (96, 160, 1), (128, 96, 2), (40, 32, 1), (64, 32, 1)]
SHAPES += [(96, 64, 2), (40, 32, 5), (6, 32, 2)]  # groups that end within a row of tiles
# The model's matrices, with so many rows that their launches are tiled as all of them are.
REAL = {
    "wq_a": 1280, "wq_b": 8448, "wkv": 512, "wq_a_wkv": 1792, "index_wq_b": 4096,
    "index_weights": 32, "compressor": 1024, "wo_a": 4224, "wo_b": 4224, "shared_gate_up": 4224,
    "shared_down": 4096, "engram_wkv": 4224, "head": 4224,
}  # fmt: skip


def stored(n: int, k: int, *, fp8_tiles: bool) -> tuple[Tensor, Tensor | None]:
    values = torch.randn(n, k, generator=torch.Generator().manual_seed(n * k))
    return fp8.quantise_tiles(values) if fp8_tiles else (values.bfloat16(), None)


@pytest.mark.parametrize(("device", "rows"), row_cases(gemv.MAX_ROWS))
@pytest.mark.parametrize("fp8_tiles", [True, False])
@pytest.mark.parametrize(("n", "k", "groups"), SHAPES)
def test_products_equal_the_reference(
    device: str, rows: int, n: int, k: int, groups: int, *, fp8_tiles: bool
) -> None:
    weight, scales = stored(n, k, fp8_tiles=fp8_tiles)
    x = torch.randn(rows, groups * k, generator=torch.Generator().manual_seed(rows))
    wanted = reference.gemv(x, weight, scales, groups)
    tensors = (weight.to(device), None if scales is None else scales.to(device))
    for plain in (False, True) if device == "cuda" else (False,):  # interpreted it is plain anyhow
        out = torch.full((rows, n), float("nan"), device=device)
        found = gemv.gemv(x.to(device), *tensors, groups=groups, plain=plain, out=out)
        assert found is out
        assert (found.cpu() - wanted).norm() <= 1e-6 * wanted.norm()


def tiling_of(n: int, k: int, groups: int) -> tuple[object, ...]:
    """Return what a launch's programs are like, but for their number."""
    rows, block, layout, warps = tiling(n, k, n // groups)
    steps = k // (16 * block)
    loads = unroll(steps, layout.size_per_thread[0], n // rows * warps)
    return rows, block, layout.size_per_thread, layout.threads_per_warp, warps, steps, loads


def test_real_matrices_are_tried_in_their_tilings() -> None:
    assert set(REAL) == set(MATRICES)
    for name, (n, k, fp8_tiles, groups) in MATRICES.items():
        fewer = REAL[name]
        assert fewer <= n
        assert tiling_of(fewer, k, groups) == tiling_of(n, k, groups), (name, fp8_tiles)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("name", REAL)
def test_products_of_real_matrices_equal_the_reference(name: str, rows: int) -> None:
    _, k, fp8_tiles, groups = MATRICES[name]
    weight, scales = stored(REAL[name], k, fp8_tiles=fp8_tiles)
    x = torch.randn(rows, groups * k, generator=torch.Generator().manual_seed(rows))
    # In double: over so many channels the reference's own sums are nearly 1e-6 off.
    matrix = (weight if scales is None else fp8.dequantise_tiles(weight, scales)).double()
    parts = zip(x.double().split(k, dim=1), matrix.split(len(matrix) // groups), strict=True)
    wanted = torch.cat([part @ rows_of.T for part, rows_of in parts], dim=1)
    tensors = (weight.cuda(), None if scales is None else scales.cuda())
    found = gemv.gemv(x.cuda(), *tensors, groups=groups).cpu().double()
    assert (found - wanted).norm() <= 1e-6 * wanted.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fp8_tiles", [True, False])
@pytest.mark.parametrize(("n", "k", "groups"), [(45, 100, 1), (15, 45, 3)])
def test_sizes_may_be_odd_and_rows_lie_apart(
    device: str, n: int, k: int, groups: int, *, fp8_tiles: bool
) -> None:
    weight, scales = stored(n, k, fp8_tiles=fp8_tiles)
    x = torch.randn(3, groups * k, generator=torch.Generator().manual_seed(n))
    wanted = reference.gemv(x, weight, scales, groups)
    found = gemv.gemv(
        apart(x, device), weight.to(device), None if scales is None else scales.to(device),
        groups=groups,
    )  # fmt: skip
    assert (found.cpu() - wanted).norm() <= 1e-6 * wanted.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fp8_tiles", [True, False])
def test_rows_that_lie_apart_have_the_bits_of_rows_side_by_side(
    device: str, *, fp8_tiles: bool
) -> None:
    weight, scales = stored(64, 96, fp8_tiles=fp8_tiles)
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(4))
    tensors = (weight.to(device), None if scales is None else scales.to(device))
    wanted = gemv.gemv(x.to(device), *tensors)
    for gap in (1, 4, 32):
        assert torch.equal(gemv.gemv(apart(x, device, gap), *tensors), wanted)


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
    with pytest.raises(ValueError, match=r"out \("):
        gemv.gemv(torch.zeros(1, 64), weight, scales, out=torch.zeros(2, 64))
    with pytest.raises(ValueError, match=r"scales \("):
        gemv.gemv(torch.zeros(1, 64), weight, torch.zeros(1, 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match="weight is"):
        gemv.gemv(torch.zeros(1, 64), weight)
