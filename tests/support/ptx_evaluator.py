"""An evaluator of the straight-line PTX that kernels pass as inline assembly, for one lane."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from .ptx_operations import Lanes, result


def run_ptx(text: str, operands: Sequence[int | None]) -> dict[int, int]:
    """Run PTX over 32-bit operands $0, $1 ..., None for outputs; return what was written."""
    registers = {f"${i}": _lane(v) for i, v in enumerate(operands) if v is not None}
    for statement in re.sub(r"\.reg [^;]*;", "", text.strip()[1:-1]).split(";"):
        if statement.strip():
            _step(statement.strip(), registers)
    return {i: int(registers[f"${i}"][0]) for i, v in enumerate(operands) if v is None}


def _step(statement: str, registers: dict[str, Lanes]) -> None:
    operation, _, rest = statement.partition(" ")
    if rest.startswith("{"):  # a word into its halves
        target, word = rest[1:].split("}")
        low, high = (name.strip() for name in target.split(","))
        value = int(_read(word.strip(" ,"), registers)[0])
        registers[low], registers[high] = _lane(value & 0xFFFF), _lane(value >> 16)
        return
    to, *inputs = (part.strip() for part in rest.split(","))
    registers[to] = result(operation, [_read(name, registers) for name in inputs])


def _read(name: str, registers: dict[str, Lanes]) -> Lanes:
    if name.startswith("0f"):
        return _lane(int(f"0x{name[2:]}", 0))
    if re.fullmatch(r"-?\d+|0x[0-9a-fA-F]+", name):
        return _lane(int(name, 0) & 0xFFFFFFFF)
    return registers[name]


def _lane(value: int) -> Lanes:
    return np.array([value], dtype=np.uint64)
