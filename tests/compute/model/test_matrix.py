"""Matrices as stored give the products of their dequantised values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compute.graph.products import product
from compute.model import matrix as model_matrix
from compute.model.matrix import MAX_ROWS, StackedMatrix, StoredMatrix, grouped_linear, linear
from kernels.formats import QUANTISERS


def stored(kind: str, n: int, k: int, groups: int = 1) -> StoredMatrix:
    generator = torch.Generator().manual_seed(n + k)
    if kind == "F8_E4M3":
        codes = torch.randint(0, 256, (n, k), generator=generator, dtype=torch.uint8)
        codes[(codes & 127) == 127] = 3  # no NaN
        scales = torch.randint(118, 124, (-(-n // 32), -(-k // 32)), generator=generator)
        return StoredMatrix(codes, scales.byte(), kind, k, groups)
    values = torch.randn(n, k, generator=generator)
    if kind == "BF16":
        return StoredMatrix(values.bfloat16(), None, kind, k, groups)
    return StoredMatrix(QUANTISERS[kind](values).view(n, -1), None, kind, k, groups)


@pytest.mark.parametrize("kind", ["F8_E4M3", "BF16", "Q8_0"])
@pytest.mark.parametrize("rows", [1, 8, 9, 33])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_stored_matrix_multiplies_as_its_values_do(
    kind: str, rows: int, dtype: torch.dtype
) -> None:
    matrix = stored(kind, 96, 64)
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)).bfloat16()
    wanted = linear(x, matrix.dequantised(torch.float32), torch.float32)
    found = linear(x, matrix, dtype).float()
    tolerance = 8e-3 if dtype == torch.bfloat16 else 1e-5
    if kind == "Q8_0" and rows <= MAX_ROWS:  # rows are rounded to q8_1
        assert (found - wanted).norm() < 0.01 * wanted.norm()
        return
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance * 1e-2)


@pytest.mark.parametrize("rows", [1, 12])
def test_groups_of_rows_take_their_own_channels(rows: int) -> None:
    matrix = stored("F8_E4M3", 128, 64, groups=2)
    x = torch.randn(rows, 2, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    whole = matrix.dequantised(torch.float32).view(2, 64, 64)
    found = grouped_linear(x, matrix, torch.float32)
    torch.testing.assert_close(found, grouped_linear(x, whole, torch.float32), rtol=1e-5, atol=1e-4)


def check_blocks(kind: str, rows: int, groups: int, device: str) -> None:
    matrix = stored(kind, 128, 512, groups)
    there = replace(matrix, values=matrix.values.to(device))
    x = torch.randn(rows, groups, 512, generator=torch.Generator().manual_seed(rows)).bfloat16()
    whole = matrix.dequantised(torch.float32).view(groups, 128 // groups, 512)
    for dtype in (torch.bfloat16, torch.float32):
        found = grouped_linear(x.to(device), there, dtype).cpu().float()
        assert found.shape == (rows, groups, 128 // groups)
        wanted = grouped_linear(x, whole, torch.float32)
        assert 1e-4 * wanted.norm() < (found - wanted).norm() < 0.02 * wanted.norm()
        if groups == 1:
            again = linear(x[:, 0].to(device), there, dtype).cpu().float()
            assert torch.equal(again, found[:, 0])


@pytest.mark.parametrize("kind", ["Q2_K", "Q6_K"])
@pytest.mark.parametrize("groups", [1, 2])
def test_many_rows_may_be_rounded_to_eight_bits(
    kind: str, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_matrix, "_goes_by_blocks", lambda *_: True)
    check_blocks(kind, 9, groups, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q6_K", "Q8_0"])
@pytest.mark.parametrize("rows", [9, 33, 200])
def test_many_rows_are_rounded_to_eight_bits_on_a_gpu(kind: str, rows: int) -> None:
    for groups in (1, 2):
        check_blocks(kind, rows, groups, "cuda")


PAIRS = [("Q4_K", "Q6_K"), ("Q8_0", "F32"), ("F8_E4M3", "BF16"), ("Q3_K", "Q2_K")]


def pair(kinds: tuple[str, str], device: str) -> StackedMatrix:
    """Matrices [96, 256] and [32, 256]; F32 is what the other one's values are."""
    parts = []
    for kind, n in zip(kinds, (96, 32), strict=True):
        made = stored("BF16" if kind == "F32" else kind, n, 256)
        scales = None if made.scales is None else made.scales.to(device)
        there = replace(made, values=made.values.to(device), scales=scales)
        parts.append(there.dequantised(torch.float32) if kind == "F32" else there)
    return StackedMatrix(tuple(parts))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kinds", PAIRS)
@pytest.mark.parametrize("rows", [1, 8, 9, 33])
def test_matrices_of_two_formats_give_their_own_columns(
    kinds: tuple[str, str], rows: int, device: str
) -> None:
    stack = pair(kinds, device)
    assert stack.n == 128
    values = [
        part if isinstance(part, torch.Tensor) else part.dequantised(torch.float32)
        for part in stack.parts
    ]
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows)).bfloat16().to(device)
    for dtype in (torch.bfloat16, torch.float32):
        found = linear(x, stack, dtype)
        assert torch.equal(found, torch.cat([linear(x, part, dtype) for part in stack.parts], 1))
        wanted = linear(x, torch.cat(values), torch.float32)
        assert (found - wanted).norm() < 0.02 * wanted.norm()
    if rows <= MAX_ROWS:
        out = torch.full((rows, 128), torch.nan, device=device)
        again = product(x.float(), stack, out=out)
        assert again is out
        assert torch.equal(product(x.float(), stack), out)
        torch.testing.assert_close(out, linear(x, stack, torch.float32))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", "BF16", "F8_E4M3"])
@pytest.mark.parametrize("rows", [1, 33])
def test_two_of_one_format_give_what_they_give_as_one(kind: str, rows: int, device: str) -> None:
    stack = pair((kind, kind), device)
    upper, lower = stack.parts
    assert isinstance(upper, StoredMatrix)
    assert isinstance(lower, StoredMatrix)
    scales = None
    if upper.scales is not None and lower.scales is not None:
        scales = torch.cat([upper.scales, lower.scales])
    one = replace(upper, values=torch.cat([upper.values, lower.values]), scales=scales)
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows)).bfloat16().to(device)
    torch.testing.assert_close(linear(x, stack, torch.float32), linear(x, one, torch.float32))
