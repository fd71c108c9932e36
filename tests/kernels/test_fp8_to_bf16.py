"""Stored fp8 matrices as bf16: the kernel against its reference."""

from __future__ import annotations

import pytest
import torch

from kernels.fp8_to_bf16 import fp8_to_bf16
from kernels.reference import fp8_to_bf16 as reference

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (32, 64), (33, 100), (96, 640)])
@pytest.mark.parametrize(("low", "high"), [(118, 124), (10, 247)])
def test_values_equal_the_reference_bit_for_bit(
    device: str, n: int, k: int, low: int, high: int
) -> None:
    check(device, n, k, low, high)


@pytest.mark.gpu  # the interpreter stores no subnormal bf16 as it is
def test_scales_may_be_extreme() -> None:
    check("cuda", 96, 640, 0, 255)


def check(device: str, n: int, k: int, low: int, high: int) -> None:
    generator = torch.Generator().manual_seed(n)
    codes = torch.randint(0, 256, (n, k), dtype=torch.uint8, generator=generator)
    codes[(codes & 127) == 127] = 3  # NaN is not equal to itself
    shape = (-(-n // 32), -(-k // 32))
    scales = torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)
    wanted = reference.fp8_to_bf16(codes, scales)
    found = fp8_to_bf16(codes.to(device), scales.to(device)).cpu()
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_codes_that_are_no_number_stay_so(device: str) -> None:
    codes = torch.tensor([[127, 255, 126]], dtype=torch.uint8)
    scales = torch.full((1, 1), 127, dtype=torch.uint8)
    found = fp8_to_bf16(codes.to(device), scales.to(device)).cpu()
    assert found.isnan().tolist() == [[True, True, False]]


def test_scales_of_another_shape_are_refused() -> None:
    codes = torch.zeros(33, 32, dtype=torch.uint8)
    with pytest.raises(ValueError, match="scales"):
        fp8_to_bf16(codes, torch.zeros(1, 1, dtype=torch.uint8))
