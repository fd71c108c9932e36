"""The largest logit's id, on the device as on the host."""

from __future__ import annotations

import pytest
import torch

from kernels.likeliest import likeliest

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [1, 33, 1024, 5000])
def test_the_largest_logit_wins_and_the_lower_id_among_equals(device: str, n: int) -> None:
    logits = torch.randn(n, generator=torch.Generator().manual_seed(n)) - 10  # all below zero
    assert likeliest(logits.to(device)).tolist() == [int(logits.argmax()), 0]
    at = [n // 3, n // 2, n - 1]
    logits[at] = 4.5
    out = torch.full((2,), -7, device=device)
    assert likeliest(logits.to(device), out=out).tolist() == [at[0], 0]


@pytest.mark.parametrize("device", DEVICES)
def test_zeros_are_equal_whatever_their_sign(device: str) -> None:
    logits = torch.full((2000,), -1.0)
    logits[1500], logits[7] = 0.0, -0.0
    assert likeliest(logits.to(device)).tolist() == [7, 0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_nan_is_reported(device: str, sign: float) -> None:
    logits = torch.zeros(3000)
    logits[[2222, 2500]] = torch.copysign(torch.tensor(float("nan")), torch.tensor(sign))
    logits[5] = float("inf")
    assert likeliest(logits.to(device)).tolist() == [2222, 1]


@pytest.mark.parametrize("device", DEVICES)
def test_infinities_have_their_place(device: str) -> None:
    logits = torch.full((40,), -float("inf"))
    assert likeliest(logits.to(device)).tolist() == [0, 0]
    logits[39] = float("inf")
    assert likeliest(logits.to(device)).tolist() == [39, 0]


def test_no_logits_are_refused() -> None:
    with pytest.raises(ValueError, match="no logits"):
        likeliest(torch.zeros(0))
