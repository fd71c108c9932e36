"""Rows on the model's grids are packed as small as the specification says, and come back whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compute.prefix.packed_rows import Form, pack, unpack
from kernels.reference.round_fp4_index import round_fp4_index
from kernels.reference.round_fp4_latent import round_fp4_latent
from kernels.reference.round_fp8 import round_fp8

CPU = torch.device("cpu")
CASES = [
    (Form.FP8, round_fp8, 512, 528),
    (Form.LATENT, round_fp4_latent, 512, 288),
    (Form.INDEX, round_fp4_index, 128, 68),
]


def _values(n: int, k: int) -> Tensor:
    """Rows of every size: groups from far below the roundings' floors to far above 448."""
    made = torch.Generator().manual_seed(1)
    values = torch.randn(n, k, generator=made)
    sizes = torch.randint(-24, 14, (n, k // 16), generator=made)
    values *= torch.exp2(sizes.float()).repeat_interleave(16, 1)
    values[torch.rand(n, k, generator=made) < 0.1] = 0.0
    values[0] = 0.0
    values[1] = -0.0
    return values


@pytest.mark.parametrize(("form", "rounded", "k", "row_bytes"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_rows_come_back_bit_for_bit(form, rounded, k, row_bytes, dtype) -> None:
    rows = rounded(_values(400, k)).to(dtype)
    packed = pack(rows, form)
    assert packed.form is form
    assert packed.n_bytes == 400 * row_bytes
    assert unpack(packed, CPU).view(torch.int32).equal(rows.float().view(torch.int32))


@pytest.mark.parametrize("form", [Form.FP8, Form.LATENT, Form.INDEX])
def test_rows_off_the_grid_are_kept_raw(form: Form) -> None:
    rows = _values(4, 128)
    rows[3, 3] = torch.nan
    for kept in (rows, rows[:3], rows[:0], rows[:3, :16].bfloat16()):
        packed = pack(kept, form)
        assert packed.form is Form.RAW
        back = unpack(packed, CPU)
        assert back.dtype == kept.dtype
        assert back.contiguous().view(torch.uint8).equal(kept.contiguous().view(torch.uint8))


def test_a_packed_row_shares_no_memory_with_the_state() -> None:
    rows = torch.ones(2, 32)
    packed = pack(rows, Form.RAW)
    rows.zero_()
    assert unpack(packed, CPU).equal(torch.ones(2, 32))
