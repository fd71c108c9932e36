"""What is no finite number stays none: never clamped, and never lost in a group's maximum.

An expert whose scale was spoiled, or a row that was, must not give numbers that look right: a NaN
reaches the logits, which name it.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.byte_planes import byte_planes
from kernels.formats.fp4_expert import Fp4Shape
from kernels.formats.k_expert import BlockShape
from kernels.gemm_blocks import gemm_blocks
from kernels.gemv import gemv
from kernels.gemv_blocks import gemv_blocks
from kernels.q8_1_rows import q8_1_rows
from kernels.reference import byte_planes as planes_reference
from kernels.reference import q8_1_rows as rows_reference
from kernels.reference import routed_m1 as reference
from kernels.reference import tiled_rows as tiled_reference
from kernels.routed_m1 import routed_m1
from kernels.routed_rows import routed_rows
from kernels.tiled_rows import tiled_rows
from tests.kernels.test_routed_m1 import BODIES, DEVICES, LIMIT, fake_experts, shape_of
from tests.support.block_experts import experts_of
from tests.support.random_blocks import random_blocks

Shape = Fp4Shape | BlockShape
NONE = [float("nan"), float("inf"), -float("inf")]
# An infinity times a zero, and the like, are what these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SCALE_AT = {"Q2_K": 80, "Q3_K": 108, "Q4_K": 0, "Q8_0": 0}  # of the first f16 of a block
BITS = [0x7E00, 0x7C00, 0xFC00]
MIXES = [("Q8_0",) * 3, ("Q2_K", "Q2_K", "Q3_K"), ("Q4_K",) * 3]


def on(cases: list[Any], n_interpreted: int) -> list[Any]:
    """Return each case on a device, by either bodies, and the first ones interpreted too."""
    interpreted = [("cpu", False, case) for case in cases[:n_interpreted]]
    launched = [("cuda", plain, case) for plain in (False, True) for case in cases]
    return [
        *(pytest.param(*each, marks=pytest.mark.interpreter) for each in interpreted),
        *(pytest.param(*each, marks=pytest.mark.gpu) for each in launched),
    ]


def spoiled_rows(value: float) -> Tensor:
    """Rows [3, 512] of which some groups have such a value, the last row none."""
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(1))
    x[0, 3] = x[1, 130] = x[1, 511] = value
    return x


def same(found: Tensor, wanted: Tensor) -> bool:
    """Whether the values are the same, NaN at the same places."""
    return torch.equal(found.cpu().nan_to_num(7.5), wanted.nan_to_num(7.5))


@pytest.mark.parametrize("value", NONE)
@pytest.mark.parametrize("device", DEVICES)
def test_a_group_of_byte_planes_has_no_scale(device: str, value: float) -> None:
    x = spoiled_rows(value)
    *found, scales = byte_planes(x.to(device))
    *wanted, wanted_scales = planes_reference.byte_planes(x)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, wanted, strict=True))
    assert same(scales, wanted_scales)
    assert scales.isnan().nonzero().tolist() == [[0, 0], [1, 4], [1, 15]]


@pytest.mark.parametrize("value", NONE)
@pytest.mark.parametrize("device", DEVICES)
def test_a_group_of_q8_1_rows_has_no_scale(device: str, value: float) -> None:
    x = spoiled_rows(value)
    codes, sides = q8_1_rows(x.to(device))
    wanted, wanted_sides = rows_reference.q8_1_rows(x)
    assert torch.equal(codes.cpu(), wanted)
    scales = rows_reference.row_scales(sides.cpu(), 16)
    assert same(scales, rows_reference.row_scales(wanted_sides, 16))
    sums = [rows_reference.row_sums(each.cpu(), 16) for each in (sides, wanted_sides)]
    assert torch.equal(*sums)
    assert scales.isnan().nonzero().tolist() == [[0, 0], [1, 4], [1, 15]]


@pytest.mark.parametrize("value", NONE)
@pytest.mark.parametrize("form", ["D4", "D2S6"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_group_of_tiled_rows_has_no_scale(device: str, form: str, value: float) -> None:
    x = spoiled_rows(value)
    found, wanted = tiled_rows(x.to(device), form), tiled_reference.tiled_rows(x, form)
    assert all(same(a.float(), b.float()) for a, b in zip(found, wanted, strict=True))
    assert found.scales.isnan().sum() == 3


@pytest.mark.parametrize("value", NONE)
@pytest.mark.parametrize(("device", "plain"), BODIES)
def test_a_row_of_products_is_none(device: str, value: float, *, plain: bool) -> None:
    x = spoiled_rows(value)[1:]
    matrix = random_blocks("Q4_K", 6, 512)
    for product in (gemv_blocks, gemm_blocks):
        found = product(x.to(device), matrix.to(device), "Q4_K", plain=plain)
        assert found.isnan().sum(1).tolist() == [6, 0]


@pytest.mark.parametrize(
    ("device", "plain", "case"),
    on(
        [
            *itertools.product(["fp4"], ["x", "weight"], NONE),
            *zip(MIXES[:1] * 3, ["x", "weight", "x"], NONE, strict=True),
            *zip(MIXES[:1] * 3, ["weight", "x", "weight"], NONE, strict=True),
            *itertools.product(MIXES[1:], ["x", "weight"], NONE),
        ],
        9,
    ),
)
def test_an_expert_of_a_spoiled_input_is_none(
    device: str, case: tuple[str | tuple[str, str, str], str, float], *, plain: bool
) -> None:
    kind, what, value = case
    shape, slots, pointers = experts(kind)
    x, weights = torch.randn(1, shape.hidden), torch.rand(2)
    if what == "x":
        x[0, 40] = value
    else:
        weights[1] = value
    for found in both(x, weights, shape, slots, pointers, device, plain=plain):
        assert bool(found.isnan().all())


@pytest.mark.parametrize("piece", [0, 1, 2])
@pytest.mark.parametrize(("device", "plain"), BODIES)
def test_a_scale_byte_of_255_gives_no_number(device: str, piece: int, *, plain: bool) -> None:
    shape, slots, pointers = experts("fp4")
    n = shape.width * shape.hidden
    slots[0, piece * (n // 2 + n // 32) + n // 2 + 13] = 255
    x, weights = torch.randn(1, shape.hidden), torch.rand(2)
    for found in both(x, weights, shape, slots, pointers, device, plain=plain):
        bad = ~found.isfinite()
        assert bool(bad.all() if piece < 2 else bad[:, 13 * 32 // shape.width].all())
    with pytest.raises(ValueError, match="scale byte 255"):
        reference.routed_m1(x, pointers, weights, shape, LIMIT, torch.float32)


@pytest.mark.parametrize(
    ("device", "plain", "case"),
    on(
        [
            *(
                (MIXES[0], piece, BITS[(piece + turn) % 3])
                for turn in range(3)
                for piece in range(3)
            ),
            *itertools.product(MIXES[1:], [0, 1, 2], BITS),
        ],
        3,
    ),
)
def test_a_blocks_scale_that_is_none_gives_no_number(
    device: str, case: tuple[tuple[str, str, str], int, int], *, plain: bool
) -> None:
    kind, piece, bits = case
    shape, slots, pointers = experts(kind)
    start = int(pointers[piece, 0]) - slots.data_ptr() + SCALE_AT[kind[piece]]
    slots.view(-1)[start : start + 2] = torch.tensor([bits & 255, bits >> 8], dtype=torch.uint8)
    x, weights = torch.randn(1, shape.hidden), torch.rand(2)
    for found in both(x, weights, shape, slots, pointers, device, plain=plain):
        bad = ~found.isfinite()
        assert bool(bad.all() if piece < 2 else bad[:, 0].all())


@pytest.mark.parametrize(("device", "plain"), BODIES)
def test_fp8_codes_that_are_none_stay_none(device: str, *, plain: bool) -> None:
    weight = torch.full((64, 256), 56, dtype=torch.uint8)
    weight[3, 200], weight[5, 17] = 127, 255
    scales = torch.full((2, 8), 127, dtype=torch.uint8)
    x = torch.randn(2, 256)
    found = gemv(x.to(device), weight.to(device), scales.to(device), plain=plain)
    assert found.isnan().nonzero()[:, 1].tolist() == [3, 5, 3, 5]


def experts(kind: str | tuple[str, str, str]) -> tuple[Shape, Tensor, Tensor]:
    """Return the shape of two experts, their slots on the CPU and the pointers [3, 2] to them."""
    torch.manual_seed(3)
    if isinstance(kind, str):
        shape = shape_of(64, 32)
        return shape, *fake_experts(shape, 2, "cpu")
    blocks = BlockShape(*((64, 32) if set(kind) == {"Q8_0"} else (256, 256)), *kind)
    return blocks, *experts_of(blocks, 2, "cpu")


def both(
    x: Tensor,
    weights: Tensor,
    shape: Shape,
    slots: Tensor,
    pointers: Tensor,
    device: str,
    *,
    plain: bool,
) -> list[Tensor]:
    """Return one token's experts by the kernels for one token, and by those for rows: [1, hidden].

    The rows are those of the pairs of both experts with the token, added up.
    """
    moved = slots.to(device)
    table = (pointers - slots.data_ptr() + moved.data_ptr()).to(device)
    x, weights = x.to(device), weights.to(device)
    one = routed_m1(x, table, weights, shape, LIMIT, dtype=torch.float32, plain=plain)
    tokens = torch.zeros(2, dtype=torch.int32, device=device)
    rows = routed_rows(
        x, tokens, weights, [0, 1, 2], table, shape, LIMIT, dtype=torch.float32, plain=plain
    )
    return [one.view(1, -1).cpu(), rows.sum(0, keepdim=True).cpu()]
