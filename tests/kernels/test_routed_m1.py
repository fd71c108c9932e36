"""The routed experts of one token: kernels against their reference."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from kernels import byte_planes, routed_m1
from kernels.formats import fp4
from kernels.formats.fp4_expert import Fp4Shape
from kernels.reference import byte_planes as reference_planes
from kernels.reference import round_fp8
from kernels.reference import routed_m1 as reference
from kernels.routed_m1_buffers import RoutedBuffers
from tests.support.row_cases import row_cases

LIMIT = 10.0
DTYPES = [torch.float32, torch.bfloat16]


def shape_of(hidden: int, width: int) -> Fp4Shape:
    matrix = width * hidden // 2
    return Fp4Shape(hidden, width, matrix, matrix, matrix)


def fake_experts(
    shape: Fp4Shape, n_experts: int, device: str, seed: int = 0, low: int = 118, high: int = 124
) -> tuple[Tensor, Tensor]:
    """Return slots [n, bytes] u8 of random codes and the pointer table [3, n] into them."""
    generator = torch.Generator().manual_seed(seed)
    codes, scales = shape.width * shape.hidden // 2, shape.width * shape.hidden // 32
    piece = codes + scales
    slots = torch.randint(0, 256, (n_experts, 3 * piece), dtype=torch.uint8, generator=generator)
    for matrix in range(3):
        at = matrix * piece + codes
        bytes_ = torch.randint(
            low, high, (n_experts, scales), dtype=torch.uint8, generator=generator
        )
        slots[:, at : at + scales] = bytes_
    slots = slots.to(device)
    starts = slots.data_ptr() + torch.arange(n_experts) * slots.shape[1]
    return slots, torch.stack([starts + matrix * piece for matrix in range(3)]).to(device)


def on_the_cpu(slots: Tensor, pointers: Tensor) -> tuple[Tensor, Tensor]:
    host = slots.cpu()
    return host, pointers.cpu() - slots.data_ptr() + host.data_ptr()


DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
# Interpreted, the plain bodies run anyhow.
BODIES = [
    pytest.param("cpu", False, marks=pytest.mark.interpreter),
    pytest.param("cuda", False, marks=pytest.mark.gpu),
    pytest.param("cuda", True, marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("device", "rows"), row_cases())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_byte_planes_equal_their_reference_bit_for_bit(
    device: str, rows: int, dtype: torch.dtype
) -> None:
    x = torch.randn(rows, 7 * 32, generator=torch.Generator().manual_seed(rows))
    x[0, :32] = 0
    x[-1, 32:64] *= 1e30
    x[-1, 64:96] *= 1e-9
    x = x.to(dtype)
    wanted = reference_planes.byte_planes(x)
    found = byte_planes.byte_planes(x.to(device))
    for found_part, wanted_part in zip(found, wanted, strict=True):
        assert torch.equal(found_part.cpu(), wanted_part)


def test_byte_planes_hold_what_fp8_rounding_gives() -> None:
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(1))
    planes, offsets, scales = reference_planes.byte_planes(x)
    shifts = torch.arange(0, 32, 8, dtype=torch.int32)
    parts = (planes.unsqueeze(-1) >> shifts) & 255
    signed = torch.where(parts[:, 2] > 127, parts[:, 2] - 256, parts[:, 2])
    whole = (parts[:, 0] + (parts[:, 1] << 8) + (signed << 16)).transpose(1, 2).reshape(3, 3, 32)
    values = (whole * 2 * scales.unsqueeze(-1)).flatten(1)
    assert torch.equal(values, round_fp8.round_fp8(x))
    assert torch.equal(offsets, (-192 * whole.sum(-1)).int())


def check(
    hidden: int, width: int, n_experts: int, device: str, *, plain: bool, dtype: torch.dtype,
    limit: float = LIMIT,
) -> None:  # fmt: skip
    shape = shape_of(hidden, width)
    slots, pointers = fake_experts(shape, n_experts, device)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, hidden, generator=generator)
    weights = torch.rand(n_experts, generator=generator)
    found = routed_m1.routed_m1(
        x.to(device), pointers, weights.to(device), shape, limit, dtype=dtype, plain=plain
    )
    _, host = on_the_cpu(slots, pointers)
    wanted = reference.routed_m1(x, host, weights, shape, limit, dtype)
    # The activation is rounded to fp8 between the products: a tie may fall the other way.
    assert (found.cpu() - wanted).norm() <= 2e-3 * wanted.norm()


SIZES = [(64, 32, 1), (256, 64, 6), (160, 96, 3), (64, 32, 16)]


@pytest.mark.parametrize(
    ("device", "plain", "dtype", "hidden", "width", "n_experts"),
    [
        *(  # these take long: each size with a type
            pytest.param("cpu", False, dtype, *sizes, marks=pytest.mark.interpreter)
            for dtype, sizes in zip(DTYPES * 2, SIZES, strict=True)
        ),
        *(
            pytest.param("cuda", plain, dtype, *sizes, marks=pytest.mark.gpu)
            for plain, dtype, sizes in product([False, True], DTYPES, SIZES)
        ),
    ],
)
def test_routed_experts_of_one_token_equal_their_reference(
    device: str, hidden: int, width: int, n_experts: int, dtype: torch.dtype, *, plain: bool
) -> None:
    check(hidden, width, n_experts, device, plain=plain, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "width"), [(1280, 768), (5120, 2304)])
def test_experts_of_real_sizes_equal_their_reference(
    hidden: int, width: int, dtype: torch.dtype, *, plain: bool
) -> None:
    check(hidden, width, 6, "cuda", plain=plain, dtype=dtype)


@pytest.mark.parametrize(("device", "plain"), BODIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate_is_clamped_from_above_alone_and_what_it_gates_both_ways(
    device: str, dtype: torch.dtype, *, plain: bool
) -> None:
    # Half of the sums lie beyond it, and below it a sigmoid is still far from 0.
    check(256, 64, 2, device, plain=plain, dtype=dtype, limit=0.75)


@pytest.mark.parametrize(("device", "plain"), BODIES)
def test_extreme_scales_and_values_beyond_the_clamp_stay_right(device: str, *, plain: bool) -> None:
    shape = shape_of(256, 32)
    slots, pointers = fake_experts(shape, 1, device, low=0, high=140)
    # Of down each row has one scale: from 2^-127, which is subnormal, to 2^-1, twice.
    at = int(pointers[2, 0] - pointers[0, 0]) + shape.down_scale
    slots[0, at : at + 256] = (torch.arange(256) % 127).byte().to(device)
    generator = torch.Generator().manual_seed(4)
    x = 50 * torch.randn(1, 256, generator=generator)
    weights = torch.rand(1, generator=generator)
    found = routed_m1.routed_m1(
        x.to(device), pointers, weights.to(device), shape, LIMIT, dtype=torch.float32, plain=plain
    )
    _, host = on_the_cpu(slots, pointers)
    wanted = reference.routed_m1(x, host, weights, shape, LIMIT, torch.float32)
    # Row by row: beside the largest the others would not be seen.
    assert (wanted != 0).float().mean() > 0.99
    assert bool(((found.cpu() - wanted).abs() <= 2e-3 * wanted.abs()).all())


@pytest.mark.parametrize(("device", "plain"), BODIES)
def test_absent_experts_add_nothing_and_given_buffers_are_used(device: str, *, plain: bool) -> None:
    shape = shape_of(64, 32)
    _, pointers = fake_experts(shape, 4, device)
    present = [0, 3]
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, 64, generator=generator).to(device)
    weights = torch.rand(4, generator=generator).to(device)
    wanted = routed_m1.routed_m1(
        x, pointers[:, present].contiguous(), weights[present], shape, LIMIT, plain=plain
    )
    holed = pointers.clone()
    holed[:, 1:3] = 0
    buffers = RoutedBuffers.new(shape, 5, device)
    for part in (buffers.activated, buffers.parts, buffers.out, buffers.row[2]):
        part.fill_(float("nan"))
    found = routed_m1.routed_m1(x, holed, weights, shape, LIMIT, buffers=buffers, plain=plain)
    assert found is buffers.out
    assert torch.equal(found, wanted)
    holed.zero_()
    out = torch.full((64,), float("nan"), device=device)
    routed_m1.routed_m1(x, holed, weights, shape, LIMIT, buffers=buffers, out=out)
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.gpu
def test_with_buffers_a_graph_replays_the_same_bits_and_nothing_is_allocated() -> None:
    shape = shape_of(256, 64)
    _, pointers = fake_experts(shape, 6, "cuda")
    x, weights = torch.randn(1, 256).cuda(), torch.rand(6).cuda()
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


def test_the_reference_reads_the_codes_that_the_format_defines() -> None:
    shape = shape_of(64, 32)
    slots, pointers = fake_experts(shape, 1, "cpu")
    gate = fp4.dequantise(slots[0, : 32 * 32].view(32, 32), slots[0, 32 * 32 : 32 * 34].view(32, 2))
    up_at = int(pointers[1, 0] - pointers[0, 0])
    assert up_at == 32 * 34
    assert gate.abs().max() <= 6 * 2.0 ** (123 - 127)


def test_a_shape_that_differs_is_refused() -> None:
    shape = shape_of(64, 32)
    _, pointers = fake_experts(shape, 2, "cpu")
    with pytest.raises(ValueError, match="x is"):
        routed_m1.routed_m1(torch.zeros(1, 32), pointers, torch.zeros(2), shape, LIMIT)
    with pytest.raises(ValueError, match="buffers"):
        routed_m1.routed_m1(
            torch.zeros(1, 64), pointers, torch.zeros(2), shape, LIMIT,
            buffers=RoutedBuffers.new(shape, 1, "cpu"),
        )  # fmt: skip
    with pytest.raises(ValueError, match="pointers"):
        routed_m1.routed_m1(torch.zeros(1, 64), pointers, torch.zeros(3), shape, LIMIT)
