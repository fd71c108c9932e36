"""The routed experts of many rows: kernels against their references."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.formats import fp4
from kernels.formats.fp4_expert import Fp4Shape
from kernels.fp4_to_bf16 import code_assembly
from kernels.prepared_rows import prepared_rows
from kernels.reference import prepared_rows as reference_rows
from kernels.reference import routed_rows as reference
from kernels.reference import sum_parts as reference_sum
from kernels.reference.round_fp8 import round_fp8
from kernels.reference.routed_m1 import routed_m1
from kernels.routed_rows import routed_rows, tiles_of
from kernels.sum_parts import sum_parts
from tests.support.row_cases import row_cases

LIMIT = 10.0
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def shape_of(hidden: int, width: int) -> Fp4Shape:
    matrix = width * hidden // 2
    return Fp4Shape(hidden, width, matrix, matrix, matrix)


def fake_experts(
    shape: Fp4Shape, n_experts: int, low: int = 118, high: int = 124
) -> tuple[Tensor, Tensor]:
    """Return slots [n, bytes] u8 of random codes on the CPU and the table [3, n] of offsets."""
    generator = torch.Generator().manual_seed(hash((shape.hidden, shape.width)) % 1000)
    codes, scales = shape.width * shape.hidden // 2, shape.width * shape.hidden // 32
    slots = torch.randint(
        0, 256, (n_experts, 3 * (codes + scales)), dtype=torch.uint8, generator=generator
    )
    for matrix in range(3):
        at = matrix * (codes + scales) + codes
        slots[:, at : at + scales] = torch.randint(
            low, high, (n_experts, scales), dtype=torch.uint8, generator=generator
        )
    starts = torch.arange(n_experts) * slots.shape[1]
    return slots, torch.stack([starts + matrix * (codes + scales) for matrix in range(3)])


class Case:
    """Pairs of a few groups, on the CPU and on a device."""

    def __init__(self, shape: Fp4Shape, sizes: Sequence[int], n_tokens: int, **scales: int) -> None:
        self.shape = shape
        self.slots, self.offsets = fake_experts(shape, len(sizes), **scales)
        generator = torch.Generator().manual_seed(sum(sizes))
        self.x = torch.randn(n_tokens, shape.hidden, generator=generator)
        chosen = [torch.randperm(n_tokens, generator=generator)[:size] for size in sizes]
        self.tokens = torch.cat([tokens.sort().values for tokens in chosen]).int()
        self.weights = torch.rand(sum(sizes), generator=generator)
        self.starts = [sum(sizes[:group]) for group in range(len(sizes) + 1)]
        self.absent: list[int] = []

    def pointers(self, slots: Tensor) -> Tensor:
        found = self.offsets + slots.data_ptr()
        found[:, self.absent] = 0
        return found.to(slots.device)

    def wanted(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return reference.routed_rows(
            self.x, self.tokens, self.weights, self.starts, self.pointers(self.slots), self.shape,
            LIMIT, dtype,
        )  # fmt: skip

    def found(self, device: str, dtype: torch.dtype = torch.float32, *, plain: bool) -> Tensor:
        slots = self.slots.to(device)
        parts = torch.full(
            (len(self.tokens), self.shape.hidden), float("nan"), dtype=dtype, device=device
        )
        found = routed_rows(
            self.x.to(device), self.tokens.to(device), self.weights.to(device), self.starts,
            self.pointers(slots), self.shape, LIMIT, dtype=dtype, plain=plain, parts=parts,
        )  # fmt: skip
        assert found is parts
        return found.cpu()


def assert_close(found: Tensor, wanted: Tensor, tolerance: float = 2e-3) -> None:
    # An activation is rounded to fp8 between the products: a tie may fall the other way.
    assert (found - wanted).norm() <= tolerance * wanted.norm()
    rows = (found - wanted).norm(dim=1) <= 10 * tolerance * wanted.norm(dim=1)
    assert bool(rows.all())


@pytest.mark.parametrize(("device", "rows"), row_cases())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prepared_rows_equal_their_reference_bit_for_bit(
    device: str, rows: int, dtype: torch.dtype
) -> None:
    width = (32, 128, 7 * 32)[rows % 3]
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, width, generator=generator)
    x[-1, :32] *= 1e30
    x[0, -32:] *= 1e-9
    x = x.to(dtype)
    wanted = reference_rows.prepared_rows(x)
    assert torch.equal(prepared_rows(x.to(device)).cpu(), wanted)
    tokens = torch.tensor([rows - 1, 0, rows - 1], dtype=torch.int32)
    found = prepared_rows(x.to(device), tokens.to(device)).cpu()
    assert torch.equal(found, wanted[tokens.long()])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("hidden", "width", "sizes"), [(64, 32, [1, 9, 0, 2, 17]), (160, 96, [8, 33, 1])]
)
def test_parts_equal_the_reference(
    device: str, hidden: int, width: int, sizes: Sequence[int]
) -> None:
    case = Case(shape_of(hidden, width), sizes, 35)
    for plain in (False, True) if device == "cuda" else (False,):  # interpreted it is plain anyhow
        assert_close(case.found(device, plain=plain), case.wanted())


@pytest.mark.gpu
@pytest.mark.parametrize("plain", [False, True])
def test_parts_of_any_number_of_pairs_equal_the_reference(*, plain: bool) -> None:
    case = Case(shape_of(160, 96), range(1, 34), 40)
    assert_close(case.found("cuda", plain=plain), case.wanted())


@pytest.mark.gpu
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    ("hidden", "width"), [(32, 32), (128, 64), (160, 96), (640, 384), (1056, 352), (5120, 2304)]
)
def test_parts_of_groups_of_all_sizes_equal_the_reference(
    hidden: int, width: int, *, plain: bool
) -> None:
    case = Case(shape_of(hidden, width), [1, 2, 8, 9, 33, 16, 64, 65, 127, 128, 200], 200)
    assert_close(case.found("cuda", plain=plain), case.wanted())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_depends_on_its_pair_alone(dtype: torch.dtype) -> None:
    shape, sizes = shape_of(640, 384), [1, 8, 33, 64, 130]
    case = Case(shape, sizes, 130)
    whole = case.found("cuda", dtype, plain=False)
    assert torch.equal(case.found("cuda", dtype, plain=False), whole)
    slots = case.slots.cuda()
    for group, (first, end) in enumerate(pairwise(case.starts)):
        for start in range(first, end, 16):
            stop = min(end, start + 16)
            found = routed_rows(
                case.x.cuda(), case.tokens[start:stop].cuda(), case.weights[start:stop].cuda(),
                [0, stop - start], case.pointers(slots)[:, group : group + 1].contiguous(), shape,
                LIMIT, dtype=dtype,
            )  # fmt: skip
            assert torch.equal(found.cpu(), whole[start:stop])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows of absent experts, when interpreted
@pytest.mark.parametrize("device", DEVICES)
def test_clamps_bf16_and_absent_experts(device: str) -> None:
    case = Case(shape_of(64, 32), [3, 2, 4], 6)
    case.x *= 200  # beyond the clamp
    case.absent = [1]
    wanted = case.wanted(torch.bfloat16).float()
    found = case.found(device, torch.bfloat16, plain=False).float()
    assert (wanted[3:5] == 0).all()
    assert torch.equal(found[3:5], wanted[3:5])
    assert_close(found, wanted, 1e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_scales_may_be_extreme(device: str) -> None:
    case = Case(shape_of(64, 32), [3, 2], 4, low=12, high=140)
    assert_close(case.found(device, plain=False), case.wanted())


@pytest.mark.parametrize(("device", "rows"), row_cases())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_shared", [False, True])
def test_sums_equal_their_reference_bit_for_bit(
    device: str, rows: int, dtype: torch.dtype, *, has_shared: bool
) -> None:
    width = 45 if rows > 1 else 1100  # of one program and of two
    generator = torch.Generator().manual_seed(4)
    parts = torch.randn(3 * rows, width, generator=generator).to(dtype)
    places = torch.randperm(3 * rows, generator=generator).view(rows, 3).int()
    shared = torch.randn(rows, width, generator=generator).to(dtype) if has_shared else None
    wanted = reference_sum.sum_parts(parts, places, shared, dtype)
    there = shared if shared is None else shared.to(device)
    found = sum_parts(parts.to(device), places.to(device), there, dtype=dtype)
    assert torch.equal(found.cpu(), wanted)


def test_the_reference_gives_what_single_tokens_give() -> None:
    case = Case(shape_of(64, 32), [1, 1, 1], 1)
    places = torch.arange(3, dtype=torch.int32).view(1, 3)
    pointers = case.pointers(case.slots)
    wanted = routed_m1(case.x, pointers, case.weights, case.shape, LIMIT, torch.float32)
    found = reference_sum.sum_parts(case.wanted(), places, None, torch.float32)[0]
    assert (found - wanted).norm() <= 1e-6 * wanted.norm()


def test_groups_are_cut_into_tiles_that_hold_them() -> None:
    tiles = tiles_of([0, 1, 1, 34, 34 + 150], (16, 32, 64))
    assert tiles == {
        64: [(2, 1, 33), (3, 34, 64), (3, 98, 64)],
        32: [(3, 162, 22)],
        16: [(0, 0, 1)],
    }


def test_what_does_not_fit_is_refused() -> None:
    case = Case(shape_of(64, 32), [2, 1], 3)
    good: dict[str, Any] = {
        "x": case.x, "tokens": case.tokens, "weights": case.weights, "starts": case.starts,
        "pointers": case.pointers(case.slots), "shape": case.shape, "limit": LIMIT,
    }  # fmt: skip
    bads: tuple[tuple[dict[str, Any], str], ...] = (
        ({"x": case.x[:, :32]}, "x is"),
        ({"tokens": case.tokens.long()}, "int32"),
        ({"weights": case.weights[:2]}, "weights"),
        ({"starts": [0, 2, 4]}, "starts"),
        ({"pointers": case.offsets[:, :1]}, "pointers"),
    )
    for bad, words in bads:
        with pytest.raises(ValueError, match=words):
            routed_rows(**(good | bad))


def test_the_assembly_gives_each_code_its_value_where_its_channel_stands() -> None:
    generator = torch.Generator().manual_seed(6)
    packed = torch.randint(0, 256, (1, 64), dtype=torch.uint8, generator=generator)
    code = 121
    scales = torch.full((1, 4), code, dtype=torch.uint8)
    values = fp4.dequantise(packed, scales)
    x = torch.randint(-8, 9, (1, 128), generator=generator).float()
    assert torch.equal(round_fp8(x), x)
    prepared = reference_rows.prepared_rows(x)[0].double()
    total = 0.0
    words = packed.view(torch.int32).view(4, 4)
    for group in range(4):
        registers = {f"${16 + i}": int(words[group, i]) & 0xFFFFFFFF for i in range(4)}
        registers |= {"$20": (code + 110) * 0x00800080}
        run(code_assembly(), registers)
        for c in range(8):
            for i in range(4):
                half = registers[f"${2 * c + i // 2}"] >> (16 * (i % 2)) & 0xFFFF
                total += bf16(half) * float(prepared[16 * c + 8 * (i // 2) + 2 * group + i % 2])
    assert total == float((values * x).double().sum())


def bf16(bits: int) -> float:
    return float(torch.tensor([bits << 16], dtype=torch.int64).int().view(torch.float32))


def bf16_bits(value: float) -> int:
    bits = int(torch.tensor([value], dtype=torch.float32).view(torch.int32)) & 0xFFFFFFFF
    assert bits & 0xFFFF == 0  # exact
    return bits >> 16


def product(a: int, b: int) -> int:
    low = bf16_bits(bf16(a & 0xFFFF) * bf16(b & 0xFFFF))
    return low | bf16_bits(bf16(a >> 16) * bf16(b >> 16)) << 16


def chosen_bytes(a: int, b: int, choice: int) -> int:
    both = a | b << 32
    chosen = [both >> (8 * (choice >> (4 * place) & 7)) & 255 for place in range(4)]
    return sum(byte << (8 * place) for place, byte in enumerate(chosen))


def run(assembly: str, registers: dict[str, int]) -> None:
    """Run straight-line PTX on numbers."""
    operations: dict[str, Callable[..., int]] = {
        "prmt.b32": chosen_bytes,
        "and.b32": int.__and__,
        "mul.lo.u32": lambda a, b: a * b & 0xFFFFFFFF,
        "mul.rn.bf16x2": product,
    }
    for name, operands in re.findall(r"^([a-z][\w.]+) (.*);$", assembly, re.MULTILINE):
        target, *sources = operands.split(", ")
        numbers = [registers[s] if s in registers else int(s) for s in sources]
        registers[target] = operations[name](*numbers)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [256, 1300])
def test_one_tokens_parts_are_added_as_many_tokens_are(device: str, width: int) -> None:
    parts = torch.randn(5, width, generator=torch.Generator().manual_seed(4))
    present = torch.tensor([1, 0, 1 << 40, 1, 0])
    wanted = reference_sum.sum_parts(parts[[0, 2, 3]], None, None, torch.float32)
    parts[present == 0] = float("nan")
    out = torch.full((1, width), float("nan")).to(device)
    sum_parts(parts.to(device), None, dtype=torch.float32, present=present.to(device), out=out)
    assert torch.equal(out.cpu(), wanted)
    places = torch.tensor([[0, 2, 3]], dtype=torch.int32).to(device)
    assert torch.equal(sum_parts(parts.to(device), places, dtype=torch.float32), out)
    with pytest.raises(ValueError, match="absent ones are of one token"):
        sum_parts(parts.to(device), places, dtype=torch.float32, present=present.to(device))
