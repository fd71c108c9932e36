"""Bytes from the host: all of them, and nothing beside."""

from __future__ import annotations

import pytest
import torch

from kernels.bring import bring
from kernels.device import can_be_read
from kernels.reference import bring as reference

DEVICES = [
    "cpu",
    pytest.param("cpu", marks=pytest.mark.interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def random_bytes(n: int, *, locked: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    found = torch.randint(0, 256, (n,), generator=generator, dtype=torch.uint8)
    return found.pin_memory() if locked else found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [0, 1, 3, 16, 4096, 4100, 24 * 264, 24 * 85 + 1])
def test_bytes_equal_the_reference_and_nothing_else_is_written(device: str, n: int) -> None:
    source = random_bytes(n, locked=device == "cuda")
    wanted = torch.empty(n, dtype=torch.uint8)
    reference.bring(source, wanted)
    around = torch.full((n + 32,), 0xA5, dtype=torch.uint8, device=device)
    bring(source, around[16 : 16 + n])
    assert torch.equal(around[16 : 16 + n].cpu(), wanted)
    assert (around[:16] == 0xA5).all()
    assert (around[16 + n :] == 0xA5).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_every_whole_dtype_comes_as_it_is(device: str, dtype: torch.dtype) -> None:
    source = torch.tensor([[1, 2, 3], [250, 7, 0]], dtype=dtype)
    if device == "cuda":
        source = source.pin_memory()
    target = torch.zeros((2, 3), dtype=dtype, device=device)
    bring(source, target)
    assert torch.equal(target.cpu(), source)


@pytest.mark.gpu
def test_a_recorded_launch_brings_what_lies_there_when_it_is_replayed() -> None:
    source, target = torch.zeros(2, dtype=torch.int64).pin_memory(), torch.zeros(2).long().cuda()
    bring(source, target)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bring(source, target)
    for turn in range(3):
        source[:] = torch.tensor([turn, -turn])
        graph.replay()
        torch.cuda.synchronize()
        assert target.tolist() == [turn, -turn]


def test_what_differs_is_refused() -> None:
    source = torch.zeros((2, 4), dtype=torch.int32)
    for target in (torch.zeros((4, 2), dtype=torch.int32), torch.zeros((2, 4), dtype=torch.int64)):
        with pytest.raises(ValueError, match="wanted the same"):
            bring(source, target)
    with pytest.raises(ValueError, match="contiguous"):
        bring(source.T, torch.zeros((4, 2), dtype=torch.int32))


def test_an_empty_source_may_lie_anywhere() -> None:
    elsewhere = torch.empty(3, device="meta")
    assert not can_be_read(elsewhere, torch.empty(3))
    assert can_be_read(elsewhere[:0], torch.empty(0))


@pytest.mark.gpu
def test_an_empty_source_in_pageable_memory_brings_nothing_to_a_gpu() -> None:
    bring(torch.zeros(0, dtype=torch.int32), torch.zeros(0, dtype=torch.int32).cuda())


@pytest.mark.gpu
def test_memory_that_a_gpu_cannot_read_is_refused() -> None:
    with pytest.raises(ValueError, match="page-locked"):
        bring(torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32).cuda())
