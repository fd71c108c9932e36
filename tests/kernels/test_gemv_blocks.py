"""A few rows times one matrix of blocks: kernels against their reference."""

from __future__ import annotations

import pytest
import torch

from kernels import gemv_blocks, q8_1_rows
from kernels.block_words import UNITS
from kernels.reference import gemv_blocks as reference
from tests.support.random_blocks import random_blocks
from tests.support.row_cases import row_cases

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def check(name: str, n: int, k: int, rows: int, groups: int, device: str, *, plain: bool) -> None:
    weight = random_blocks(name, n, k)
    x = torch.randn(rows, groups * k, generator=torch.Generator().manual_seed(rows))
    scratch = q8_1_rows.empty_rows(rows * groups, k, torch.device(device))
    for part in scratch:
        part.fill_(-1)
    out = torch.full((rows, n), float("nan"), device=device)
    found = gemv_blocks.gemv_blocks(
        x.to(device), weight.to(device), name, groups=groups, plain=plain, rows=scratch, out=out
    )
    assert found is out
    wanted = reference.gemv_blocks(x, weight, name, groups)
    assert (found.cpu() - wanted).norm() <= 2e-6 * wanted.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", sorted(UNITS))
def test_products_equal_the_reference(device: str, name: str) -> None:
    check(name, 24, 512, 2, 2, device, plain=True)


@pytest.mark.parametrize(("device", "rows"), row_cases(gemv_blocks.MAX_ROWS))
def test_products_of_any_number_of_rows_equal_the_reference(device: str, rows: int) -> None:
    for name in sorted(UNITS):
        check(name, 6, 256, rows, 1, device, plain=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", sorted(UNITS))
def test_scales_may_be_extreme(device: str, name: str) -> None:
    weight = random_blocks(name, 8, 512, largest=30_000.0)  # of float16's 65,504
    small = random_blocks(name, 8, 512, largest=3e-6)  # subnormal
    weight = torch.cat([weight, small])
    x = torch.randn(1, 512, generator=torch.Generator().manual_seed(7))
    found = gemv_blocks.gemv_blocks(x.to(device), weight.to(device), name).cpu()
    wanted = reference.gemv_blocks(x, weight, name, 1)
    for part in (slice(0, 8), slice(8, 16)):
        apart = (found - wanted)[:, part].norm()
        assert apart <= 2e-6 * wanted[:, part].norm()


@pytest.mark.parametrize("device", DEVICES)
def test_q8_0_rows_may_end_within_a_unit(device: str) -> None:
    check("Q8_0", 6, 160, 1, 1, device, plain=False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(UNITS))
@pytest.mark.parametrize("rows", range(1, 9))
@pytest.mark.parametrize(
    ("n", "k", "groups"),
    [(64, 256, 1), (64, 768, 1), (96, 1280, 2), (40, 2304, 1), (64, 5120, 1), (128, 8192, 2)],
)
def test_explicit_layouts_equal_the_reference(
    name: str, rows: int, n: int, k: int, groups: int
) -> None:
    check(name, n, k, rows, groups, "cuda", plain=False)
    check(name, n, k, rows, groups, "cuda", plain=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(UNITS))
def test_a_row_has_the_same_bits_alone_among_others_and_replayed(name: str) -> None:
    weight = random_blocks(name, 1280, 2304).cuda()
    x = torch.randn(8, 2304).cuda()
    together = gemv_blocks.gemv_blocks(x, weight, name)
    for row in range(8):
        alone = gemv_blocks.gemv_blocks(x[row : row + 1].contiguous(), weight, name)
        assert torch.equal(alone[0], together[row])
    scratch, out = q8_1_rows.empty_rows(8, 2304, x.device), torch.empty_like(together)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    gemv_blocks.gemv_blocks(x, weight, name, rows=scratch, out=out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemv_blocks.gemv_blocks(x, weight, name, rows=scratch, out=out)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, together)


def test_what_does_not_fit_is_refused() -> None:
    weight = random_blocks("Q2_K", 4, 256)
    with pytest.raises(ValueError, match="format"):
        gemv_blocks.gemv_blocks(torch.zeros(1, 256), weight, "Q5_K")
    with pytest.raises(ValueError, match="x is"):
        gemv_blocks.gemv_blocks(torch.zeros(1, 32), weight, "Q2_K")
    with pytest.raises(ValueError, match="rows"):
        gemv_blocks.gemv_blocks(torch.zeros(9, 256), weight, "Q2_K")
    with pytest.raises(ValueError, match="bytes"):
        gemv_blocks.gemv_blocks(torch.zeros(1, 256), weight[:, :83].contiguous(), "Q2_K")
    with pytest.raises(ValueError, match=r"out \("):
        gemv_blocks.gemv_blocks(torch.zeros(1, 256), weight, "Q2_K", out=torch.zeros(4))
