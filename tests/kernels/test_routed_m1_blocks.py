"""The routed experts of one token over GGUF blocks: kernels against their reference."""

from __future__ import annotations

import pytest
import torch

from kernels import routed_m1
from kernels.formats.k_expert import BlockShape
from kernels.reference import routed_m1 as reference
from kernels.routed_m1_buffers import RoutedBuffers
from tests.support.block_experts import experts_of

LIMIT = 10.0
MIXES = {
    "q2k-q3k": ("Q2_K", "Q2_K", "Q3_K"),
    "q4k": ("Q4_K", "Q4_K", "Q4_K"),
    "q8_0": ("Q8_0", "Q8_0", "Q8_0"),
    "mixed": ("Q6_K", "Q4_K", "Q6_K"),
}
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def check(
    shape: BlockShape, n_experts: int, device: str, *, plain: bool, dtype: torch.dtype, size: float
) -> None:
    slots, pointers = experts_of(shape, n_experts, device)
    generator = torch.Generator().manual_seed(2)
    x = size * torch.randn(1, shape.hidden, generator=generator)
    weights = torch.rand(n_experts, generator=generator)
    pointers[:, 1:2] = 0  # absent
    buffers = RoutedBuffers.new(shape, n_experts, device)
    buffers.parts.fill_(float("nan"))
    found = routed_m1.routed_m1(
        x.to(device), pointers, weights.to(device), shape, LIMIT, dtype=dtype, plain=plain,
        buffers=buffers,
    )  # fmt: skip
    assert found is buffers.out
    host = slots.cpu()
    moved = torch.where(pointers.cpu() == 0, 0, pointers.cpu() - slots.data_ptr() + host.data_ptr())
    wanted = reference.routed_m1(x, moved, weights, shape, LIMIT, dtype)
    # The activation is rounded between the products: a tie may fall the other way.
    assert (found.cpu() - wanted).norm() <= 3e-3 * wanted.norm()
    assert wanted.norm() > 0
    if dtype == torch.bfloat16:  # beside a rounding to q8_1 it would not be missed
        written = (buffers.parts, buffers.activated) if plain else (buffers.parts,)
        for rows in written:
            there = rows[pointers[2] != 0]
            assert torch.equal(there, there.bfloat16().float())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("mix", "hidden", "width"),
    [("q2k-q3k", 256, 256), ("q4k", 256, 256), ("q8_0", 64, 32), ("mixed", 256, 256)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routed_experts_equal_their_reference(
    device: str, mix: str, hidden: int, width: int, dtype: torch.dtype
) -> None:
    shape = BlockShape(hidden, width, *MIXES[mix])
    check(shape, 2, device, plain=True, dtype=dtype, size=1.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_beyond_the_clamp_stay_right(device: str, dtype: torch.dtype) -> None:
    check(BlockShape(64, 32, *MIXES["q8_0"]), 3, device, plain=True, dtype=dtype, size=3000.0)


@pytest.mark.gpu
@pytest.mark.parametrize("mix", sorted(MIXES))
@pytest.mark.parametrize(
    ("hidden", "width", "n_experts"),
    [(256, 256, 2), (1280, 768, 3), (5120, 2304, 3), (4096, 512, 8)],
)
@pytest.mark.parametrize("size", [1.0, 300.0])
def test_explicit_layouts_equal_the_reference(
    mix: str, hidden: int, width: int, n_experts: int, size: float
) -> None:
    shape = BlockShape(hidden, width, *MIXES[mix])
    check(shape, n_experts, "cuda", plain=False, dtype=torch.float32, size=size)
    check(shape, n_experts, "cuda", plain=False, dtype=torch.bfloat16, size=size)


@pytest.mark.gpu
@pytest.mark.parametrize("mix", sorted(MIXES))
def test_a_replayed_graph_has_the_same_bits_and_allocates_nothing(mix: str) -> None:
    shape = BlockShape(1280, 768, *MIXES[mix])
    _slots, pointers = experts_of(shape, 6, "cuda")
    x, weights = torch.randn(1, 1280).cuda(), torch.rand(6).cuda()
    buffers = RoutedBuffers.new(shape, 6, "cuda")
    eager = routed_m1.routed_m1(x, pointers, weights, shape, LIMIT, buffers=buffers).clone()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    routed_m1.routed_m1(x, pointers, weights, shape, LIMIT, buffers=buffers)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routed_m1.routed_m1(x, pointers, weights, shape, LIMIT, buffers=buffers)
    buffers.out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(buffers.out, eager)


def test_formats_without_kernels_and_rows_of_part_blocks_are_refused() -> None:
    pointers, weights = torch.zeros(3, 1, dtype=torch.int64), torch.zeros(1)
    x = torch.zeros(1, 256)
    unknown = BlockShape(256, 256, "Q5_K", "Q5_K", "Q5_K")
    with pytest.raises(ValueError, match="format"):
        routed_m1.routed_m1(x, pointers, weights, unknown, LIMIT)
    narrow = BlockShape(256, 32, "Q2_K", "Q2_K", "Q3_K")
    with pytest.raises(ValueError, match="whole blocks"):
        routed_m1.routed_m1(x, pointers, weights, narrow, LIMIT)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [768, 2304])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_copied_in_bulk_have_the_bits_of_a_row_wherever_it_lies(
    width: int, dtype: torch.dtype
) -> None:
    shape = BlockShape(2048, width, *MIXES["q2k-q3k"])
    slots, pointers = experts_of(shape, 5, "cuda")
    weights = torch.rand(5).cuda()
    x = torch.randn(1, 2048).to(dtype).cuda()
    parts = []
    for row, n, word in (
        (x, 5, 0),
        (x.float(), 3, 0x7FC00000),
        (torch.cat([x[:, :1], x], 1), 5, -1),
    ):
        buffers = RoutedBuffers.new(shape, 5, "cuda")
        buffers.parts.fill_(float("nan"))
        codes, sides = buffers.activated_row
        codes.fill_(77)
        sides.fill_(word)
        given = row if row.shape[1] == 2048 else row.view(-1)[1:].view(1, 2048)
        found = routed_m1.routed_m1(
            given, pointers[:, :n].contiguous(), weights[:n], shape, LIMIT, buffers=buffers,
            sums=False,
        )  # fmt: skip
        parts.append(found[:3].clone())
    assert not parts[0].isnan().any()
    assert all(torch.equal(part, parts[0]) for part in parts)
    assert slots.is_cuda


@pytest.mark.gpu
def test_rows_copied_in_bulk_have_the_same_bits_each_time() -> None:
    shape = BlockShape(5120, 2304, *MIXES["q2k-q3k"])
    _slots, pointers = experts_of(shape, 3, "cuda")
    pointers[:, 1:2] = 0
    x, weights = torch.randn(1, 5120).cuda(), torch.rand(3).cuda()
    wanted = routed_m1.routed_m1(x, pointers, weights, shape, LIMIT).clone()
    for _ in range(3):
        found = routed_m1.routed_m1(x, pointers, weights, shape, LIMIT)
        assert torch.equal(found, wanted)


@pytest.mark.gpu
def test_rows_copied_in_bulk_come_from_page_locked_memory_too() -> None:
    shape = BlockShape(1024, 768, *MIXES["q2k-q3k"])
    slots, pointers = experts_of(shape, 3, "cpu")
    starts, x, weights = pointers - slots.data_ptr(), torch.randn(1, 1024).cuda(), torch.rand(3)
    found = []
    for memory in (slots.cuda(), slots.pin_memory()):
        at = (memory.data_ptr() + starts).cuda()
        found.append(routed_m1.routed_m1(x, at, weights.cuda(), shape, LIMIT).clone())
        torch.cuda.synchronize()
    assert torch.equal(*found)


@pytest.mark.gpu
def test_rows_copied_in_bulk_round_the_row_as_it_is_rounded_elsewhere() -> None:
    shape = BlockShape(1024, 256, *MIXES["q2k-q3k"])
    for size in (1e-8, 1.0, 3e4):  # of smaller ones gate times up is nothing
        check(shape, 3, "cuda", plain=False, dtype=torch.float32, size=size)
        check(shape, 3, "cuda", plain=True, dtype=torch.float32, size=size)
