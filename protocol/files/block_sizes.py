"""Block sizes of the official checkpoint and of GGUF; a test holds `kernels/formats/` equal.

Source: model specification, sections 2.2, 6 and 8.
"""

from __future__ import annotations

from typing import NamedTuple

TILE = 32  # edge of an fp8 scale tile; values per scale of fp4 rows, Engram rows and activations
LATENT_GROUP = 16  # values per scale of a compressed row
FP4_PER_BYTE = 2  # low nibble first


class BlockType(NamedTuple):
    """One GGUF tensor type: its number in the file and the size of one block."""

    type_id: int
    name: str
    n_values: int
    n_bytes: int


# Source: ggml's tensor types and block structures. A type without a file in `kernels/formats/` may
# stand in a header, but not in a tensor that is read. Numbers that ggml has withdrawn are missing.
BLOCK_TYPES = tuple(
    BlockType(*row)
    for row in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (9, "Q8_1", 32, 36),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
    )
)
BLOCK_TYPE_OF_ID = {block.type_id: block for block in BLOCK_TYPES}
BLOCK_TYPE_OF_NAME = {block.name: block for block in BLOCK_TYPES}
# Types that a weight may be read from; the rest is refused with the tensor's name.
READABLE_TYPES = frozenset(
    {
        "F32", "F16", "BF16", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "IQ2_XXS",
    }
)  # fmt: skip
