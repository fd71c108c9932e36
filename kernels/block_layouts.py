"""Rows of block formats times one q8_1 row, with explicit layouts and inline PTX: the shared part.

A lane owns whole units, halves of super-blocks, of a few matrix rows, so that every product with a
block scale is a whole number in the lane. Blocks lie as the file has them: neighbouring lanes load
neighbouring words, whatever the blocks' alignment, and the compiler moves them inside the warp.
Blocks of 144 bytes are aligned to 16 and are loaded by four words. A step's words are asked
for before those of the step before it are used, where registers allow it: no load passes the
compiler's barriers.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .block_words import assembly, constraints

_Q2_K = gl.constexpr(assembly("Q2_K"))
_Q3_K = gl.constexpr(assembly("Q3_K"))
_Q4_K = gl.constexpr(assembly("Q4_K"))
_Q6_K = gl.constexpr(assembly("Q6_K"))
_Q8_0 = gl.constexpr(assembly("Q8_0"))
_Q2_K_OPERANDS = gl.constexpr(constraints("Q2_K"))
_Q3_K_OPERANDS = gl.constexpr(constraints("Q3_K"))
_Q4_K_OPERANDS = gl.constexpr(constraints("Q4_K"))
_Q6_K_OPERANDS = gl.constexpr(constraints("Q6_K"))
_Q8_0_OPERANDS = gl.constexpr(constraints("Q8_0"))
# The first word of the unit in the neighbouring lane, the other half of the super-block.
_OTHER = gl.constexpr(
    "shfl.sync.bfly.b32 $0, $8, 1, 31, -1;" + "".join(f" mov.b32 ${i}, 0;" for i in range(1, 8))
)
_OTHER_OPERANDS = gl.constexpr(",".join(["=r"] * 8 + ["r"] * 8))


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a program's [rows, units, 8 words] lie in its lanes."""

    rows: int  # matrix rows a program
    units: int  # units a step
    warps: int
    layout: gl.BlockedLayout  # a lane has all words of its units
    loads: gl.BlockedLayout  # neighbouring lanes have neighbouring words
    vectors: gl.BlockedLayout  # the same by four words

    def loads_of(self, name: str) -> gl.BlockedLayout:
        """Return the layout that words of a format are loaded in."""
        return self.vectors if name == "Q4_K" else self.loads


def tiling(n_units: int, rows_a_lane: int, rows: int = 0) -> Tiling:
    """Return the layouts for matrix rows of `n_units` units, `rows` of them a program if given."""
    lanes = min(16, n_units & -n_units)  # so that a program's rows are even
    while rows and rows % (32 // lanes * rows_a_lane):
        rows_a_lane //= 2
    rows_a_warp = 32 // lanes * rows_a_lane
    warps = rows // rows_a_warp if rows else 1
    unit_lanes = min(4, lanes)
    return Tiling(
        rows_a_warp * warps,
        lanes,
        warps,
        gl.BlockedLayout([rows_a_lane, 1, 8], [32 // lanes, lanes, 1], [warps, 1, 1], [2, 1, 0]),
        gl.BlockedLayout(
            [rows_a_warp * unit_lanes // 4, lanes // unit_lanes, 1],
            [4 // unit_lanes, unit_lanes, 8],
            [warps, 1, 1],
            [2, 1, 0],
        ),
        gl.BlockedLayout(
            [2 * rows_a_lane, 1, 4], [16 // lanes, lanes, 2], [warps, 1, 1], [2, 1, 0]
        ),
    )


def loads_ahead(*names: str) -> bool:
    """Whether a step's words are asked for a step early: two steps' of these fit the registers."""
    return "Q8_0" not in names


@gluon.jit
def places(ROWS: gl.constexpr, UNITS_A_STEP: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the row [ROWS, 1, 1], unit [1, UNITS, 1] and word [1, 1, 8] of each place."""
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    unit = gl.arange(0, UNITS_A_STEP, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    word = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    row = gl.expand_dims(gl.expand_dims(row, 1), 2)
    unit = gl.expand_dims(gl.expand_dims(unit, 0), 2)
    return row, unit, gl.expand_dims(gl.expand_dims(word, 0), 0)


@gluon.jit
def row_words(
    codes, sides, STEP: gl.constexpr, UNITS: gl.constexpr, UNITS_A_STEP: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return the row's codes of four groups and its scales and sums, [1, UNITS, 8] i32 each."""
    _, unit, word = places(1, UNITS_A_STEP, LAYOUT)
    at = codes + word // 4 * (UNITS * 4) + unit * 4 + word % 4
    start: gl.constexpr = STEP * UNITS_A_STEP * 4
    x0, x1 = gl.load(at + start), gl.load(at + (start + UNITS * 8))
    x2, x3 = gl.load(at + (start + UNITS * 16)), gl.load(at + (start + UNITS * 24))
    return x0, x1, x2, x3, gl.load(sides + unit * 8 + word + STEP * UNITS_A_STEP * 8)


@gluon.jit
def _start(row, unit, BLOCKS: gl.constexpr, BYTES: gl.constexpr, BLOCK: gl.constexpr):
    """Return the byte where a unit's super-block begins, BLOCK super-blocks further on."""
    return (row * BLOCKS + unit // 2 + BLOCK) * BYTES


@gluon.jit
def load_units(
    at, STEP: gl.constexpr, FORMAT: gl.constexpr, BYTES: gl.constexpr, BLOCKS: gl.constexpr,
    ROWS: gl.constexpr, UNITS_A_STEP: gl.constexpr, LAYOUT: gl.constexpr, LOADS: gl.constexpr,
):  # fmt: skip
    """Return four tensors of eight words a unit, six of one word, and the units' places.

    at  address of the program's first matrix row, a multiple of 4

    A format that has fewer repeats its first. The numbers are those of `block_words.UNITS`.
    """
    block: gl.constexpr = STEP * UNITS_A_STEP // 2
    matrix = at.to(gl.pointer_type(gl.int32), bitcast=True)
    if BYTES % 16 == 0:
        matrix = gl.multiple_of(matrix, 16)
    row, unit, word = places(ROWS, UNITS_A_STEP, LOADS)
    w, s = matrix + (_start(row, unit, BLOCKS, BYTES, block) >> 2) + word, unit & 1
    row, unit, word = places(ROWS, UNITS_A_STEP, LAYOUT)
    start = _start(row, unit, BLOCKS, BYTES, block)
    one, later = matrix + (start >> 2), unit & 1
    place = later * 4 + (start & 2) * 8
    if FORMAT == "Q2_K":
        t0 = gl.load(w + (s * 8 + 4))
        s0, s1, s2 = _word(one, later, 0, 2), _word(one, later, 1, 2), _word(one, later, 20, 0)
        return t0, t0, t0, t0, s0, s1, s2, s0, s0, s0, place
    elif FORMAT == "Q3_K":  # noqa: RET505  only the taken branch is compiled
        t0, t1, t2 = gl.load(w + (s * 8 + 8)), gl.load(w), gl.load(w + 20)
        return t0, t1, t2, t0, place, place, place, place, place, place, place
    elif FORMAT == "Q4_K":
        t0, t1, t2 = gl.load(w + (s * 16 + 4)), gl.load(w + (s * 16 + 12)), gl.load(w)
        return t0, t1, t2, t0, place, place, place, place, place, place, place
    elif FORMAT == "Q6_K":
        t0, t1 = gl.load(w + s * 16), gl.load(w + (s * 16 + 8))
        t2 = gl.load(w + (s * 8 + 32))
        s0, s1, s2 = _word(one, later, 16, 16), _word(one, later, 40, 8), _word(one, later, 48, 2)
        s3, s4, s5 = _word(one, later, 49, 2), _word(one, later, 50, 2), _word(one, later, 52, 0)
        return t0, t1, t2, t0, s0, s1, s2, s3, s4, s5, place
    else:
        t0, t1 = gl.load(w + s * 34), gl.load(w + (s * 34 + 9))
        t2, t3 = gl.load(w + (s * 34 + 17)), gl.load(w + (s * 34 + 26))
        s0, s1 = _word(one, later, 8, 34), _word(one, later, 25, 34)
        return t0, t1, t2, t3, s0, s1, s0, s0, s0, s0, place


@gluon.jit
def unit_sums(units, row, FORMAT: gl.constexpr, LAYOUT: gl.constexpr):
    """Return [ROWS, UNITS] f32: each loaded unit of each row times its part of the q8_1 row."""
    t0, t1, t2, t3, s0, s1, s2, s3, s4, s5, place = units
    x0, x1, x2, x3, side = row
    t0 = gl.convert_layout(t0, LAYOUT)
    if FORMAT == "Q2_K":
        sums = gl.inline_asm_elementwise(
            _Q2_K, _Q2_K_OPERANDS, [x0, x1, x2, x3, side, t0, s0, s1, s2, place],
            dtype=gl.int32, is_pure=True, pack=8,
        )  # fmt: skip
    elif FORMAT == "Q3_K":
        t1, t2 = gl.convert_layout(t1, LAYOUT), gl.convert_layout(t2, LAYOUT)
        other = gl.inline_asm_elementwise(
            _OTHER, _OTHER_OPERANDS, [t0], dtype=gl.int32, is_pure=True, pack=8
        )
        sums = gl.inline_asm_elementwise(
            _Q3_K, _Q3_K_OPERANDS,
            [x0, x1, x2, x3, side, t0, t1, t2, gl.expand_dims(gl.sum(other, 2), 2), place],
            dtype=gl.int32, is_pure=True, pack=8,
        )  # fmt: skip
    elif FORMAT == "Q4_K":
        t1, t2 = gl.convert_layout(t1, LAYOUT), gl.convert_layout(t2, LAYOUT)
        sums = gl.inline_asm_elementwise(
            _Q4_K, _Q4_K_OPERANDS, [x0, x1, x2, x3, side, t0, t1, t2, place],
            dtype=gl.int32, is_pure=True, pack=8,
        )  # fmt: skip
    elif FORMAT == "Q6_K":
        t1, t2 = gl.convert_layout(t1, LAYOUT), gl.convert_layout(t2, LAYOUT)
        sums = gl.inline_asm_elementwise(
            _Q6_K, _Q6_K_OPERANDS,
            [x0, x1, x2, x3, side, t0, t1, t2, s0, s1, s2, s3, s4, s5, place],
            dtype=gl.int32, is_pure=True, pack=8,
        )  # fmt: skip
    else:
        t1, t2 = gl.convert_layout(t1, LAYOUT), gl.convert_layout(t2, LAYOUT)
        t3 = gl.convert_layout(t3, LAYOUT)
        sums = gl.inline_asm_elementwise(
            _Q8_0, _Q8_0_OPERANDS, [x0, x1, x2, x3, side, t0, t1, t2, t3, s0, s1, place],
            dtype=gl.int32, is_pure=True, pack=8,
        )  # fmt: skip
    # Seven of the eight words are 0.
    return gl.sum(sums, 2).to(gl.float32, bitcast=True)


@gluon.jit
def _word(at, second, START: gl.constexpr, MORE: gl.constexpr):
    return gl.load(at + (second * MORE + START))
