"""The shared expert's activation: the kernel against the references."""

from __future__ import annotations

import pytest
import torch

from kernels.reference.round_fp8 import round_fp8
from kernels.reference.swiglu import swiglu as reference_swiglu
from kernels.swiglu import swiglu
from tests.support.row_cases import row_cases

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def gate_up_of(n_tokens: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n_tokens * width)
    return torch.randn(n_tokens, 2 * width, generator=generator) * 8  # many beyond the clamp


@pytest.mark.parametrize(("device", "n_tokens"), row_cases())
def test_activations_equal_the_reference(device: str, n_tokens: int) -> None:
    gate_up = gate_up_of(n_tokens, (288, 64, 2304)[n_tokens % 3])
    gate, up = gate_up.chunk(2, dim=1)
    assert gate.max() > 10
    assert up.min() < -10 < 10 < up.max()
    wanted = reference_swiglu(gate, up, 10.0, None)
    out = torch.full(wanted.shape, float("nan"), device=device)
    found = swiglu(gate_up.to(device), 10.0, dtype=torch.float32, rounds=False, out=out)
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("device", DEVICES)
def test_the_roundings_are_those_of_the_references(device: str) -> None:
    gate_up = gate_up_of(5, 256)
    gate, up = gate_up.bfloat16().chunk(2, dim=1)
    wanted = reference_swiglu(gate, up, 10.0, None).bfloat16()
    found = swiglu(gate_up.to(device), 10.0, dtype=torch.bfloat16, rounds=False).cpu()
    assert (found != wanted.float()).float().mean() < 0.01  # ties of the last bit
    torch.testing.assert_close(found, wanted.float(), rtol=8e-3, atol=0)
    rounded = swiglu(gate_up.to(device), 10.0, dtype=torch.bfloat16, rounds=True)
    assert torch.equal(rounded.cpu(), round_fp8(found))


@pytest.mark.parametrize("device", DEVICES)
def test_nan_is_not_clamped_away(device: str) -> None:
    gate_up = torch.ones(1, 128, device=device)
    gate_up[0, 3] = gate_up[0, 64 + 5] = float("nan")
    found = swiglu(gate_up, 10.0, dtype=torch.float32, rounds=False).cpu()
    assert found.isnan().nonzero()[:, 1].tolist() == [3, 5]


def test_odd_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="swiglu"):
        swiglu(torch.zeros(1, 96), 10.0, dtype=torch.float32, rounds=False)
