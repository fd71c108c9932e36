"""Changes of the device's table: what is written, and in which order."""

from __future__ import annotations

import random

import pytest
import torch

from compute.experts.table_changes import N_ROOMS, N_TRIPLES, TableChanges

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
N_LAYERS, N_EXPERTS = 12, 40


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [1, 3, N_TRIPLES, N_TRIPLES + 1, N_LAYERS * N_EXPERTS])
def test_changes_are_written_each_after_the_one_before(device: str, n: int) -> None:
    table = torch.full((N_LAYERS, N_EXPERTS), -1, dtype=torch.int32, device=device)
    wanted = table.cpu().clone()
    changes, drawn = TableChanges(table), random.Random(n)
    assert torch.equal(table.cpu(), wanted)
    keys = [(layer, expert) for layer in range(N_LAYERS) for expert in range(N_EXPERTS)]
    for turn in range(3 * N_ROOMS):  # rooms are used again while the device may be behind
        triples = [(*key, drawn.randrange(-1, 2**31 - 1)) for key in drawn.sample(keys, n)]
        changes.apply(triples)
        for layer, expert, slot in triples:
            wanted[layer, expert] = slot
        if turn % 5 == 4:
            assert torch.equal(table.cpu(), wanted)
    assert torch.equal(table.cpu(), wanted)


@pytest.mark.gpu
def test_a_change_is_seen_by_what_is_launched_after_it_and_not_before() -> None:
    table = torch.zeros((N_LAYERS, N_EXPERTS), dtype=torch.int32, device="cuda")
    changes, seen = TableChanges(table), []
    busy = torch.randn((4096, 4096), device="cuda")
    for slot in range(2 * N_ROOMS):
        busy = busy @ busy / 64
        seen.append(table[3, 5].clone())
        changes.apply([(3, 5, slot + 1)])
    assert [int(value) for value in seen] == list(range(2 * N_ROOMS))
