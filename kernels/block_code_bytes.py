"""PTX that makes four signed bytes for the tensor cores of four neighbouring bytes of a block.

Each operation takes words of four bytes; fields are cut out of all four at once, and one product
multiplies them with their group's scale, since no byte's product reaches its neighbour: Q2_K's are
at most 45, Q3_K's, raised by 128, from 0 to 252. The functions of `block_tiles.py` do the same byte
by byte. Sources: ggml block layouts; PTX instruction set.
"""

from __future__ import annotations

CODES_2 = 0x03030303
THIRD = 0x04040404
CODES_4 = 0x0F0F0F0F
HIGH_2 = 0x30303030
SIGNS = 0x80808080
OFFSET_32 = 0x20202020


def _moved(to: str, word: str, right: int) -> str:
    """A word moved right, or left where that is negative."""
    return f"shr.u32 {to}, {word}, {right};" if right >= 0 else f"shl.b32 {to}, {word}, {-right};"


def _program(*lines: str) -> str:
    return "\n".join(["{ .reg .b32 a, b;", *lines, "}"])


def _q2_k(part: int) -> str:
    """Inputs: bytes of codes; scale, from $2 on."""
    move = _moved("a", "$1", 2 * (part % 4))
    return _program(move, f"and.b32 a, a, {CODES_2};", "mul.lo.u32 $0, a, $2;")


def _q3_k(part: int) -> str:
    """Inputs: low bits, third bits; the scale's opposite from $3, four times it and 128 from $7."""
    return _program(
        _moved("a", "$1", 2 * (part % 4)),
        f"and.b32 a, a, {CODES_2};",
        _moved("b", "$2", part - 2),
        f"and.b32 b, b, {THIRD};",
        "or.b32 a, a, b;",
        "mad.lo.u32 a, a, $3, $7;",
        f"xor.b32 $0, a, {SIGNS};",
    )


def _q4_k(part: int) -> str:
    """Input: bytes of codes."""
    return _program(_moved("a", "$1", 4 * (part % 2)), f"and.b32 $0, a, {CODES_4};")


def _q6_k(part: int) -> str:
    """Inputs: low bits, high bits. Set top bits keep borrows inside their byte."""
    return _program(
        _moved("a", "$1", 4 * (part % 4 // 2)),
        f"and.b32 a, a, {CODES_4};",
        _moved("b", "$2", 2 * (part % 4) - 4),
        f"and.b32 b, b, {HIGH_2};",
        "or.b32 a, a, b;",
        f"or.b32 a, a, {SIGNS};",
        f"sub.u32 a, a, {OFFSET_32};",
        f"xor.b32 $0, a, {SIGNS};",
    )


# For each of the eight parts of 32 values of a super-block.
Q2_K = tuple(_q2_k(part) for part in range(8))
Q3_K = tuple(_q3_k(part) for part in range(8))
Q4_K = tuple(_q4_k(part) for part in range(8))
Q6_K = tuple(_q6_k(part) for part in range(8))
Q2_K_OPERANDS = "=r,r,r,r,r,r"
Q3_K_OPERANDS = "=r,r,r,r,r,r,r,r,r,r,r"
Q4_K_OPERANDS = "=r,r"
Q6_K_OPERANDS = "=r,r,r"
