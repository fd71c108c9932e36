"""The query latent and the window row: the kernel against its reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.norm_latents import norm_latents
from kernels.reference import norm_latents as reference
from tests.support.row_cases import ROWS

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
PRECISIONS = [(torch.bfloat16, True), (torch.float32, True), (torch.float32, False)]
# tokens, q, k, turned channels, first position, slots of the ring
SIZES = [
    (1, 128, 64, 16, 0, 8), (1, 1280, 512, 64, 131, 128), (2, 64, 96, 16, 7, 8),
    (8, 96, 64, 32, 4, 8), (9, 96, 160, 32, 13, 16), (33, 64, 64, 64, 5, 40),
]  # fmt: skip
EVERY_NUMBER = [(n, 96, 160, 32, 13, 40) for n in range(1, ROWS[-1] + 1)]
CASES = [pytest.param("cpu", *sizes, marks=pytest.mark.interpreter) for sizes in SIZES]
CASES += [pytest.param("cuda", *sizes, marks=pytest.mark.gpu) for sizes in [*SIZES, *EVERY_NUMBER]]
EPS = 1e-20


def table(n: int, turned: int) -> Tensor:
    angles = torch.outer(torch.arange(n), 1.0 / 100 ** (torch.arange(turned // 2) / turned))
    return torch.stack([angles.cos(), angles.sin()], -1)


def inputs(n_tokens: int, q: int, k: int, turned: int, first: int, device: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(n_tokens + q)
    made = {
        "projected": torch.randn(n_tokens, q + k, generator=generator),
        "q_norm": torch.rand(q, generator=generator) + 0.5,
        "kv_norm": torch.rand(k, generator=generator) + 0.5,
        "first": torch.tensor([first]),
        "turns": table(first + n_tokens, turned),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}


def run(
    function: Any, made: dict[str, Any], dtype: torch.dtype, rounds: bool, n_slots: int, **more: Any
) -> tuple[Tensor, Tensor]:
    k = len(made["kv_norm"])
    ring = torch.full((n_slots, k), 7.0, dtype=dtype, device=made["first"].device)
    qr = function(*made.values(), EPS, dtype=dtype, rounds=rounds, ring=ring, **more)
    return qr.cpu(), ring.cpu().float()


def nearly(found: Tensor, wanted: Tensor, dtype: torch.dtype, rounds: bool) -> None:
    """Rounded values may sit on the other side of a tie, a few of them, by one step of the grid."""
    if rounds or dtype == torch.bfloat16:
        apart = (found - wanted).abs()
        assert (apart > 0).float().mean() <= 0.005
        assert (apart <= 0.13 * wanted.abs() + 1e-3).all()
    else:
        assert (found - wanted).norm() <= 2e-6 * wanted.norm()


@pytest.mark.parametrize(("device", "n_tokens", "q", "k", "turned", "first", "n_slots"), CASES)
@pytest.mark.parametrize(("dtype", "rounds"), PRECISIONS)
def test_both_parts_equal_the_reference(
    device: str, n_tokens: int, q: int, k: int, turned: int, first: int, n_slots: int,
    dtype: torch.dtype, rounds: bool,
) -> None:  # fmt: skip
    made = inputs(n_tokens, q, k, turned, first, "cpu")
    wanted = run(reference.norm_latents, made, dtype, rounds, n_slots)
    made = inputs(n_tokens, q, k, turned, first, device)
    qr = torch.full((n_tokens, q), float("nan"), device=device)
    found = run(norm_latents, made, dtype, rounds, n_slots, qr=qr)
    assert torch.equal(qr.cpu(), found[0])
    for found_part, wanted_part in zip(found, wanted, strict=True):
        nearly(found_part, wanted_part, dtype, rounds)
    written = [(first + t) % n_slots for t in range(n_tokens)]
    others = [slot for slot in range(n_slots) if slot not in written]
    assert (found[1][others] == 7.0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_widths_may_be_odd_where_nothing_is_rounded(device: str) -> None:
    made = inputs(3, 45, 22, 8, 6, "cpu")
    wanted = run(reference.norm_latents, made, torch.float32, False, 5)
    found = run(norm_latents, inputs(3, 45, 22, 8, 6, device), torch.float32, False, 5)
    for found_part, wanted_part in zip(found, wanted, strict=True):
        nearly(found_part, wanted_part, torch.float32, False)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_may_be_part_of_a_wider_tensor(device: str) -> None:
    made = inputs(3, 64, 64, 16, 4, device)
    plain = run(norm_latents, made, torch.bfloat16, True, 8)
    wide = torch.full((3, 200), float("nan"), device=device)
    wide[:, 8:136] = made["projected"]
    strided = run(norm_latents, {**made, "projected": wide[:, 8:136]}, torch.bfloat16, True, 8)
    assert all(torch.equal(a, b) for a, b in zip(plain, strided, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_has_the_same_bits_alone_and_among_others(device: str) -> None:
    made = inputs(5, 96, 64, 16, 6, device)
    together = run(norm_latents, made, torch.bfloat16, True, 16)
    for row in range(5):
        alone = {
            **made,
            "projected": made["projected"][row : row + 1],
            "first": made["first"] + row,
        }
        qr, ring = run(norm_latents, alone, torch.bfloat16, True, 16)
        assert torch.equal(qr[0], together[0][row])
        assert torch.equal(ring[(6 + row) % 16], together[1][(6 + row) % 16])


@pytest.mark.gpu
def test_a_replayed_graph_reads_the_position_on_the_device() -> None:
    made = inputs(1, 1280, 512, 64, 300, "cuda")
    ring = torch.zeros(128, 512, dtype=torch.bfloat16, device="cuda")
    settings: Any = {"eps": EPS, "dtype": torch.bfloat16, "rounds": True, "ring": ring}
    norm_latents(**made, **settings)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm_latents(**made, **settings)
    for position in (0, 127, 128, 299):
        made["first"].fill_(position)
        graph.replay()
        _, wanted = run(norm_latents, made, torch.bfloat16, True, 128)
        assert torch.equal(ring[position % 128].cpu().float(), wanted[position % 128])


def test_without_a_kernel_the_reference_runs() -> None:
    made = inputs(2, 64, 64, 16, 3, "cpu")
    found = run(norm_latents, made, torch.bfloat16, True, 8)
    wanted = run(reference.norm_latents, made, torch.bfloat16, True, 8)
    nearly(found[0], wanted[0], torch.bfloat16, True)


def test_what_does_not_fit_is_refused() -> None:
    made = inputs(3, 64, 64, 16, 3, "cpu")
    with pytest.raises(ValueError, match="ring"):
        run(norm_latents, made, torch.bfloat16, True, 2)
    with pytest.raises(ValueError, match="columns"):
        run(norm_latents, {**made, "q_norm": torch.zeros(32)}, torch.bfloat16, True, 8)
    with pytest.raises(ValueError, match="first"):
        run(norm_latents, {**made, "first": torch.zeros(1)}, torch.bfloat16, True, 8)
    with pytest.raises(ValueError, match="turns"):
        run(norm_latents, {**made, "turns": torch.zeros(9, 64, 2)}, torch.bfloat16, True, 8)
    with pytest.raises(ValueError, match=r"qr \("):
        run(norm_latents, made, torch.bfloat16, True, 8, qr=torch.zeros(2, 64))
