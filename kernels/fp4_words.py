"""Dot products of packed fp4 codes with byte planes, exact in 32-bit whole numbers.

A 32-bit word holds eight E2M1 codes, element 0 in the lowest nibble. Doubled, a code is one of
0, 1, 2, 3, 4, 6, 8, 12 with a sign: a byte permute looks four of them up at once, biased by 192 so
that they are unsigned, and a byte dot product multiplies them with four bytes of a plane. What the
bias adds is taken away by the planes' offsets. Sources: PTX instruction set, `prmt` (in its default
mode a set top bit of a selector replicates the byte's sign, which is 1 in both tables) and `dp4a`.
"""

from __future__ import annotations

import triton
import triton.language as tl

WORDS_A_GROUP = 4
_INPUTS = 7  # the words, then three planes of two halves

# 192 + v for codes 0..7 and 192 - v for codes 8..15: all have the top bit set, so the table that
# does not hold a code's sign gives 0xFF, and the conjunction of both gives the right byte.
_TABLES = """
mov.b32 plus0, 0xC3C2C1C0;
mov.b32 plus1, 0xCCC8C6C4;
mov.b32 minus0, 0xBDBEBFC0;
mov.b32 minus1, 0xB4B8BABC;
"""
_WORD = """
xor.b32 flipped, {word}, 0x88888888;
shr.u32 upper, {word}, 16;
shr.u32 upper_flipped, flipped, 16;
prmt.b32 a, plus0, plus1, {word};
prmt.b32 b, minus0, minus1, flipped;
and.b32 low, a, b;
prmt.b32 a, plus0, plus1, upper;
prmt.b32 b, minus0, minus1, upper_flipped;
and.b32 high, a, b;
dp4a.u32.u32 sum0, low, {p0}, {sum0};
dp4a.u32.u32 sum0, high, {p1}, sum0;
dp4a.u32.u32 sum1, low, {p2}, {sum1};
dp4a.u32.u32 sum1, high, {p3}, sum1;
dp4a.u32.s32 sum2, low, {p4}, {sum2};
dp4a.u32.s32 sum2, high, {p5}, sum2;
"""


def _group_assembly() -> str:
    """PTX of four words against their planes; the sum leaves in the first of four outputs."""
    lines = [
        "{ .reg .b32 flipped, upper, upper_flipped, a, b, low, high, sum0, sum1, sum2;",
        ".reg .b32 plus0, plus1, minus0, minus1;",
        _TABLES,
    ]
    for word in range(WORDS_A_GROUP):
        names = [f"${WORDS_A_GROUP * (1 + i) + word}" for i in range(_INPUTS)]
        planes = {f"p{i}": name for i, name in enumerate(names[1:])}
        sums = {f"sum{i}": f"sum{i}" if word else "0" for i in range(3)}
        lines.append(_WORD.format(word=names[0], **planes, **sums))
    lines.append("mad.lo.s32 sum0, sum1, 256, sum0; mad.lo.s32 $0, sum2, 65536, sum0;")
    lines.append("mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; }")
    return "\n".join(lines)


GROUP_ASSEMBLY = tl.constexpr(_group_assembly())
GROUP_CONSTRAINTS = tl.constexpr(",".join(["=r"] * WORDS_A_GROUP + ["r"] * WORDS_A_GROUP * _INPUTS))


@triton.jit
def plain_word_dot(word, p0, p1, p2, p3, p4, p5):
    """Return what the PTX sums for each word, bias and all, in plain whole numbers.

    word and p0 .. p5 i32 that broadcast; returns i32.
    """
    total = word * 0 + p0 * 0
    for element in tl.static_range(8):
        code = (word >> (4 * element)) & 15
        size = code & 7
        doubled = tl.where(size < 4, size, (2 + (size & 1)) << tl.maximum((size >> 1) - 1, 0))
        biased = 192 + tl.where(code > 7, -doubled, doubled)
        shift = 8 * (element % 4)
        if element < 4:
            low, middle, high = p0, p2, p4
        else:
            low, middle, high = p1, p3, p5
        value = ((low >> shift) & 255) | (((middle >> shift) & 255) << 8)
        total += biased * (value + ((((high >> shift) << 24) >> 24) << 16))
    return total
