"""Matrices as stored give the products of their dequantised values."""

from __future__ import annotations

import pytest
import torch

from compute.model.matrix import MAX_ROWS, StoredMatrix, grouped_linear, linear
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
