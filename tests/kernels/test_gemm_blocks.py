"""Many rows times one matrix of blocks: kernels against their reference."""

from __future__ import annotations

import pytest
import torch

from kernels import device, gemm_blocks
from kernels.reference import gemm_blocks as reference
from kernels.reference import gemv_blocks as single
from tests.support.random_blocks import random_blocks

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
NAMES = sorted(reference.FORMS)


def check(name: str, n: int, k: int, rows: int, device: str) -> None:
    weight = random_blocks(name, n, k)
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows))
    out = torch.full((rows, n), float("nan"), device=device)
    found = gemm_blocks.gemm_blocks(x.to(device), weight.to(device), name, out=out)
    assert found is out
    wanted = reference.gemm_blocks(x, weight, name)
    assert (found.cpu() - wanted).norm() <= 2e-6 * wanted.norm()
    assert bool(((found.cpu() - wanted).norm(dim=1) <= 1e-5 * wanted.norm(dim=1)).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("rows", "n", "k"), [(2, 6, 256), (9, 20, 512), (33, 70, 256)])
def test_products_equal_the_reference(device: str, name: str, rows: int, n: int, k: int) -> None:
    check(name, n, k, rows, device)


@pytest.mark.interpreter
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("name", NAMES)
def test_a_few_rows_equal_the_reference(name: str, rows: int) -> None:
    check(name, 6, 256, rows, "cpu")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("largest", [30_000.0, 3e-6])  # near float16's end, and subnormal
def test_scales_may_be_extreme(device: str, name: str, largest: float) -> None:
    weight = random_blocks(name, 6, 256, largest=largest)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(7))
    found = gemm_blocks.gemm_blocks(x.to(device), weight.to(device), name)
    wanted = reference.gemm_blocks(x, weight, name)
    assert wanted.norm() > 0
    assert (found.cpu() - wanted).norm() <= 2e-6 * wanted.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("k", [32, 160, 288])
def test_q8_0_rows_may_end_within_a_unit(device: str, k: int) -> None:
    check("Q8_0", 6, k, 3, device)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [*range(1, 34), 64, 200])
def test_products_of_any_number_of_rows_equal_the_reference(name: str, rows: int) -> None:
    check(name, 96, 768, rows, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("n", "k"), [(64, 256), (40, 2304), (65, 5120), (2304, 5120)])
def test_products_of_real_sizes_equal_the_reference(name: str, n: int, k: int) -> None:
    check(name, n, k, 33, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [1, 8, 33, 100])
def test_both_bodies_give_the_same_bits(name: str, rows: int) -> None:
    weight = random_blocks(name, 96, 768).cuda()
    x = torch.randn(rows, 768, generator=torch.Generator().manual_seed(rows)).cuda()
    one, other = (gemm_blocks.gemm_blocks(x, weight, name, plain=plain) for plain in (False, True))
    assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_same_bits_alone_and_among_others(name: str) -> None:
    weight = random_blocks(name, 1280, 2304).cuda()
    x = torch.randn(100, 2304).cuda()
    together = gemm_blocks.gemm_blocks(x, weight, name)
    for start, end in ((0, 1), (1, 18), (18, 67), (67, 100)):
        alone = gemm_blocks.gemm_blocks(x[start:end].contiguous(), weight, name)
        assert torch.equal(alone, together[start:end])


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_is_near_what_single_rows_give(name: str) -> None:
    weight = random_blocks(name, 24, 512)
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(5))
    wanted = single.gemv_blocks(x, weight, name, 1)
    # D4 rounds as q8_1 does; D2S6 has half as many scales.
    tolerance = 2e-2 if reference.FORMS[name] == "D2S6" else 1e-6
    found = reference.gemm_blocks(x, weight, name)
    assert (found - wanted).norm() <= tolerance * wanted.norm()


@pytest.mark.parametrize(
    ("capability", "has"),
    [((7, 5), False), ((8, 0), True), ((9, 0), True), ((10, 0), False), ((12, 1), True)],
)
def test_byte_products_are_asked_of_tensor_cores_that_have_them(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch, *, has: bool
) -> None:
    monkeypatch.setattr(device, "capability", lambda _: capability)
    assert device.has_byte_products(torch.device("cuda")) is has


def test_what_does_not_fit_is_refused() -> None:
    weight = random_blocks("Q2_K", 4, 256)
    with pytest.raises(ValueError, match="format"):
        gemm_blocks.gemm_blocks(torch.zeros(1, 256), weight, "Q5_K")
    with pytest.raises(ValueError, match="x is"):
        gemm_blocks.gemm_blocks(torch.zeros(1, 32), weight, "Q2_K")
    with pytest.raises(ValueError, match="bytes"):
        gemm_blocks.gemm_blocks(torch.zeros(1, 256), weight[:, :83].contiguous(), "Q2_K")
    with pytest.raises(ValueError, match=r"out \("):
        gemm_blocks.gemm_blocks(torch.zeros(1, 256), weight, "Q2_K", out=torch.zeros(4))
