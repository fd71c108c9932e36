"""A small evaluator of the straight-line PTX that kernels pass as inline assembly."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

MASK = 0xFFFFFFFF


def run_ptx(text: str, operands: Sequence[int | None]) -> dict[int, int]:
    """Run PTX over 32-bit operands $0, $1 ..., None for outputs; return what was written."""
    registers: dict[str, int] = {f"${i}": v for i, v in enumerate(operands) if v is not None}
    for statement in re.sub(r"\.reg [^;]*;", "", text.strip()[1:-1]).split(";"):
        if statement.strip():
            _step(statement.strip(), registers)
    return {i: registers[f"${i}"] for i, v in enumerate(operands) if v is None}


def _step(statement: str, registers: dict[str, int]) -> None:
    operation, _, rest = statement.partition(" ")
    if rest.startswith("{"):  # mov.b32 {low, high}, word
        target, word = rest[1:].split("}")
        low, high = (name.strip() for name in target.split(","))
        value = _read(word.strip(" ,"), registers)
        registers[low], registers[high] = value & 0xFFFF, value >> 16
        return
    to, *inputs = (part.strip() for part in rest.split(","))
    values = [_read(name, registers) for name in inputs]
    registers[to] = _result(operation, values) & MASK


def _read(name: str, registers: dict[str, int]) -> int:
    if name.startswith("0f"):
        return int(f"0x{name[2:]}", 0)
    if re.fullmatch(r"-?\d+|0x[0-9a-fA-F]+", name):
        return int(name, 0) & MASK
    return registers[name]


def _result(operation: str, v: list[int]) -> int:
    head = operation.split(".", 1)[0]
    if ".f32" in operation:
        return _floats(operation, v)
    if head in {"dp4a", "dp2a"}:
        return _dot(operation, v)
    if head == "prmt":
        parts = (v[0] | v[1] << 32).to_bytes(8, "little")
        return int.from_bytes(bytes(parts[v[2] >> 4 * i & 7] for i in range(4)), "little")
    if head == "bfe":
        return _signed(v[0] >> v[1] & (1 << v[2]) - 1, v[2])
    simple = {
        "mov": lambda: v[0],
        "and": lambda: v[0] & v[1],
        "or": lambda: v[0] | v[1],
        "xor": lambda: v[0] ^ v[1],
        "sub": lambda: v[0] - v[1],
        "shl": lambda: v[0] << v[1],
        "shr": lambda: v[0] >> v[1],
        "shf": lambda: (v[0] | v[1] << 32) >> (v[2] & 31),
        "mul": lambda: v[0] * v[1],
        "mad": lambda: v[0] * v[1] + v[2],
        "setp": lambda: int(v[0] != v[1]),
        "selp": lambda: v[0] if v[2] else v[1],
    }
    return int(simple[head]())


def _dot(operation: str, v: list[int]) -> int:
    head, *_, a_type, b_type = operation.split(".")
    a_bits, n = (8, 4) if head == "dp4a" else (16, 2)
    b = v[1] >> 16 if ".hi." in operation else v[1]
    total = v[2]
    for i in range(n):
        x, y = v[0] >> a_bits * i & (1 << a_bits) - 1, b >> 8 * i & 255
        total += (_signed(x, a_bits) if a_type == "s32" else x) * (
            _signed(y, 8) if b_type == "s32" else y
        )
    return total


def _floats(operation: str, v: list[int]) -> int:
    if operation == "cvt.rn.f32.s32":
        return _bits(float(_signed(v[0], 32)))
    if operation == "cvt.f32.f16":
        return _bits(struct.unpack("<e", struct.pack("<H", v[0]))[0])
    f = [struct.unpack("<f", struct.pack("<I", bits))[0] for bits in v]
    head = operation.split(".", 1)[0]
    if head == "neg":
        return _bits(-f[0])
    return _bits(f[0] * f[1] + (f[2] if head == "fma" else 0.0))


def _bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> bits - 1 else value
