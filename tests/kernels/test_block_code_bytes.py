"""PTX that makes signed bytes of blocks: run on numbers, against what the blocks' values are."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels import block_code_bytes
from kernels.formats import FORMATS

# Where a super-block's f16 scales stand; they are 1, and minima 0, so that values are whole.
SCALES = {"Q2_K": (80, 82), "Q3_K": (108, 108), "Q4_K": (0, 2), "Q6_K": (208, 208)}
MASK = 0xFFFFFFFF
OPERATIONS: dict[str, Callable[..., int]] = {
    "shr.u32": lambda a, n: a >> n,
    "shl.b32": lambda a, n: a << n & MASK,
    "and.b32": int.__and__,
    "or.b32": int.__or__,
    "xor.b32": int.__xor__,
    "sub.u32": lambda a, b: (a - b) & MASK,
    "mul.lo.u32": lambda a, b: a * b & MASK,
    "mad.lo.u32": lambda a, b, c: (a * b + c) & MASK,
}


def run(assembly: str, inputs: dict[int, int]) -> list[int]:
    """Run straight-line PTX and return the four bytes of its output."""
    registers = {f"${number}": value & MASK for number, value in inputs.items()}
    for name, operands in re.findall(r"^([a-z]\w*\.\w+[\w.]*) (.*);$", assembly, re.MULTILINE):
        target, *sources = operands.split(", ")
        numbers = [registers[s] if s in registers else int(s) for s in sources]
        registers[target] = OPERATIONS[name](*numbers)
    return list(registers["$0"].to_bytes(4, "little"))


def word(block: Tensor, at: int) -> int:
    return int.from_bytes(bytes(block[at : at + 4].tolist()), "little")


def blocks_of(name: str) -> tuple[Tensor, Tensor]:
    """Return blocks [n, bytes] and what 256 values of each are, as whole numbers."""
    generator = torch.Generator().manual_seed(3)
    size = FORMATS[name].BLOCK_BYTES
    blocks = torch.randint(0, 256, (8, size), dtype=torch.uint8, generator=generator)
    blocks[0], blocks[1] = 0, 255
    one = torch.tensor([1.0], dtype=torch.float16).view(torch.uint8)
    d, d_min = SCALES[name]
    blocks[:, d_min : d_min + 2] = 0
    blocks[:, d : d + 2] = one
    return blocks, FORMATS[name].dequantise(blocks).int()


def scales_of(block: Tensor, name: str) -> Tensor:
    """Return the whole scales of the 16 groups of a block."""
    if name == "Q2_K":
        return (block[:16] & 15).int()
    low = torch.cat([block[96:104] & 15, block[96:104] >> 4]).int()
    high = torch.cat([(block[104:108] >> shift) & 3 for shift in (0, 2, 4, 6)]).int()
    return (low | high << 4) - 32


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K"])
def test_bytes_are_codes_times_scales(name: str) -> None:
    for block, values in zip(*blocks_of(name), strict=True):
        scales = scales_of(block, name)
        for part in range(8):
            for first in range(0, 32, 4):
                scale = int(scales[2 * part + first // 16])
                if name == "Q2_K":
                    codes = word(block, 16 + 32 * (part // 4) + first)
                    found = run(block_code_bytes.Q2_K[part], {1: codes, 2: scale})
                    sign = 1
                else:
                    raised = (128 + 4 * scale) * 0x01010101
                    low = word(block, 32 + 32 * (part // 4) + first)
                    inputs = {1: low, 2: word(block, first), 3: -scale, 7: raised}
                    found = run(block_code_bytes.Q3_K[part], inputs)
                    sign = -1
                at = 32 * part + first
                assert found == [sign * value & 255 for value in values[at : at + 4].tolist()]


def test_bytes_of_q4_k_and_q6_k_are_codes() -> None:
    for block, values in zip(*blocks_of("Q6_K"), strict=True):
        scales = block[192:208].view(torch.int8).int()
        for part in range(8):
            h, j = part // 4, part % 4
            for first in range(0, 32, 4):
                low = word(block, 64 * h + 32 * (j % 2) + first)
                high = word(block, 128 + 32 * h + first)
                found = run(block_code_bytes.Q6_K[part], {1: low, 2: high})
                codes = [byte - 256 if byte > 127 else byte for byte in found]
                scale, at = int(scales[2 * part + first // 16]), 32 * part + first
                assert [scale * code for code in codes] == values[at : at + 4].tolist()
    for part in range(8):
        found = run(block_code_bytes.Q4_K[part], {1: 0xFEDCBA98})
        assert found == ([8, 10, 12, 14] if part % 2 == 0 else [9, 11, 13, 15])
