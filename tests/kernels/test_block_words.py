"""The PTX of one unit of blocks, evaluated on the CPU, against dequantised weights."""

from __future__ import annotations

import struct

import pytest
import torch

from kernels.block_words import UNITS, assembly, constraints
from kernels.formats import FORMATS
from kernels.reference import q8_1_rows as rows
from tests.support.ptx_evaluator import run_ptx
from tests.support.random_blocks import random_blocks

VALUES = 256


def operands(
    name: str, data: bytes, block: int, half: int, codes: bytes, side: list[int]
) -> list[int | None]:
    """What a lane passes in for one unit: words from the aligned address below the block."""
    unit = UNITS[name]
    start = block * unit.block_bytes
    aligned = start // 4

    def word(number: int) -> int:
        part = data[4 * (aligned + number) : 4 * (aligned + number) + 4]
        return int(struct.unpack("<I", part)[0])

    passed = [struct.unpack("<I", codes[4 * i : 4 * i + 4])[0] for i in range(32)] + side
    for first, more in unit.tensors:
        passed += [word(first + half * more + i) for i in range(8)]
    for first, more in unit.scalars:
        passed += [word(first + half * more)] * 8
    place = 4 * half + 8 * (start % 4)
    return [None] * 8 + passed + [place] * 8


@pytest.mark.parametrize("name", sorted(UNITS))
def test_a_unit_equals_the_dequantised_weights_times_the_rounded_row(name: str) -> None:
    n_blocks = 4
    blocks = random_blocks(name, n_blocks, VALUES, seed=len(name))
    weights = FORMATS[name].dequantise(blocks.view(1, -1)).double().view(n_blocks, VALUES)
    codes, sides = rows.q8_1_rows(
        torch.randn(1, VALUES, generator=torch.Generator().manual_seed(2))
    )
    x = rows.dequantise(codes, sides, VALUES)
    ordered = rows.in_order(codes, VALUES)[0].contiguous()
    text, data = assembly(name), blocks.numpy().tobytes() + bytes(4)
    for block in range(n_blocks):
        for half in (0, 1):
            part = slice(128 * half, 128 * half + 128)
            side = [value & 0xFFFFFFFF for value in sides[0, half].tolist()]
            passed = operands(name, data, block, half, ordered[part].numpy().tobytes(), side)
            found = run_ptx(text, passed)
            assert [found[i] for i in range(1, 8)] == [0] * 7
            value = struct.unpack("<f", struct.pack("<I", found[0]))[0]
            products = weights[block, part] * x[0, part]
            assert abs(value - float(products.sum())) <= 3e-7 * float(products.abs().sum())


@pytest.mark.parametrize("name", sorted(UNITS))
def test_every_operand_has_a_constraint(name: str) -> None:
    unit = UNITS[name]
    wanted = 8 * (7 + len(unit.tensors) + len(unit.scalars))
    assert len(constraints(name).split(",")) == wanted
    assert f"${wanted}" not in assembly(name)
