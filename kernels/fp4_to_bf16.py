"""Packed fp4 codes as bf16 values under their scale, in a lane's registers.

An E2M1 code moved to bf16's sign, exponent and first bit is 2^-126 of its value. One multiplication
takes that, the scale and 2^-16 in: what it meets must be 2^16 times itself (`prepared_rows`). So
scales of SMALLEST to LARGEST give exact values, 2^-116 to 2^17; others count as the nearest.
Sources: PTX instruction set, `prmt` and `mul.bf16x2`, which keeps subnormal numbers.
"""

from __future__ import annotations

import triton.language as tl

SMALLEST = tl.constexpr(11)  # E8M0 codes
LARGEST = tl.constexpr(144)
SCALE_OFFSET = tl.constexpr(110)  # from a scale's code to the factor's exponent field


def code_assembly() -> str:
    """PTX of four words: for each of their eight codes, the four values as two pairs of bf16."""
    lines = ["{ .reg .b32 both, moved;"]
    for pair in range(2):
        first, second = f"${16 + 2 * pair}", f"${17 + 2 * pair}"
        for byte in range(4):
            choice = 0x1100 * (4 + byte) + 0x11 * byte
            lines.append(f"prmt.b32 both, {first}, {second}, {choice};")
            # The code goes to a half's top and, by the same multiplication, six bits below.
            for nibble, mask, factor in ((0, 0x000F000F, 0x1040), (1, 0x00F000F0, 0x104)):
                out = f"${2 * (2 * byte + nibble) + pair}"
                lines.append(f"and.b32 moved, both, {mask};")
                lines.append(f"mul.lo.u32 moved, moved, {factor};")
                lines.append(f"and.b32 moved, moved, {0x81C081C0};")
                lines.append(f"mul.rn.bf16x2 {out}, moved, $20;")
    return "\n".join([*lines, "}"])


CODE_ASSEMBLY = tl.constexpr(code_assembly())
CODE_CONSTRAINTS = tl.constexpr(",".join(["=&r"] * 16 + ["r"] * 8))
