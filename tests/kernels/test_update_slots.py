"""The device's slot table: changes arrive, and nothing else is written."""

from __future__ import annotations

import pytest
import torch

from kernels.reference import update_slots as reference
from kernels.update_slots import unique_triples, update_slots

DEVICES = [
    "cpu",
    pytest.param("cpu", marks=pytest.mark.interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
L, E, N_SLOTS = 5, 33, 50


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [0, 1, 127, 128, 165])
def test_changes_equal_the_reference(device: str, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    keys = torch.randperm(L * E, generator=generator)[:n].int()
    slots = torch.randint(-1, N_SLOTS, (n,), generator=generator, dtype=torch.int32)
    triples = torch.stack([keys // E, keys % E, slots], dim=1)
    wanted = torch.full((L, E), -1, dtype=torch.int32)
    found = wanted.clone().to(device)
    reference.update_slots(wanted, triples, N_SLOTS)
    update_slots(found, triples.to(device), N_SLOTS)
    assert torch.equal(found.cpu(), wanted)
    assert (wanted.flatten()[keys.long()] == slots).all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_triple_out_of_range_writes_nothing(device: str) -> None:
    far = 2**31 - 1
    wrong = [(-1, 0, 1), (L, 0, 1), (0, -1, 1), (0, E, 1), (0, 0, -2), (0, 0, N_SLOTS)]
    wrong += [(far, far, 1), (-far, far, 1), (0, far, 1), (0, 0, far), (0, 0, -far)]
    around = torch.full((L + 2, E), 9, dtype=torch.int32, device=device)
    table = around[1:-1]
    triples = torch.tensor([*wrong, (1, 2, 3)], dtype=torch.int32, device=device)
    update_slots(table, triples, N_SLOTS)
    wanted = torch.full((L + 2, E), 9, dtype=torch.int32)
    wanted[2, 2] = 3
    assert torch.equal(around.cpu(), wanted)


def test_the_last_change_of_a_key_wins() -> None:
    changes = [(0, 1, 7), (4, 32, 0), (0, 1, -1), (1, 1, 49), (0, 1, 8)]
    triples = unique_triples(changes, L, E, N_SLOTS)
    assert triples == [(0, 1, 8), (4, 32, 0), (1, 1, 49)]
    assert unique_triples([], L, E, N_SLOTS) == []


@pytest.mark.parametrize(
    "wrong", [(-1, 0, 0), (L, 0, 0), (0, -1, 0), (0, E, 0), (0, 0, -2), (0, 0, N_SLOTS)]
)
def test_a_change_out_of_range_is_an_error_on_the_host(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=f"layer {wrong[0]} expert {wrong[1]} slot {wrong[2]}"):
        unique_triples([(0, 0, 0), wrong], L, E, N_SLOTS)


def test_other_shapes_and_dtypes_are_refused() -> None:
    table = torch.zeros(L, E, dtype=torch.int32)
    for triples in (
        torch.zeros(2, 4, dtype=torch.int32),
        torch.zeros(2, 3, dtype=torch.int64),
        torch.zeros(3, 2, dtype=torch.int32).T,
    ):
        with pytest.raises(ValueError, match="triples"):
            update_slots(table, triples, N_SLOTS)
    with pytest.raises(ValueError, match="table"):
        update_slots(table.long(), torch.zeros(2, 3, dtype=torch.int32), N_SLOTS)
