"""PTX of one unit, half a super-block of 128 weights, times 128 codes of a q8_1 row.

Invariants: dot products and their products with block scales are exact whole numbers; the four
32-value groups of a unit are then added in a fixed order in f32, times the row's scales, and the
block's own f16 scales are multiplied last. `plain_blocks.py` computes the same sums by value.

Weights come as aligned 32-bit words. Blocks of 110 and 210 bytes begin at even addresses: of those
the word below is read, and a funnel shift by 16 bits moves what is wanted into place. Fields are
cut out of words, never moved where a mask alone does: a field that stays 4 or 16 times too large is
made up for once a group. Sources: ggml block layouts (`formats/`); PTX instruction set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .ptx_lines import ROW, WORDS, PtxLines


@dataclass(frozen=True, slots=True)
class UnitWords:
    """Where a unit's words stand in its super-block, in words: start, and more for the second."""

    block_bytes: int  # of 256 values
    tensors: tuple[tuple[int, int], ...]  # eight neighbouring words each
    scalars: tuple[tuple[int, int], ...]  # one word each

    @property
    def halves(self) -> bool:
        """Whether blocks begin at even addresses that may be no multiples of four."""
        return self.block_bytes % 4 != 0


UNITS = {
    # scales of this half, d and dmin
    "Q2_K": UnitWords(84, ((4, 8),), ((0, 2), (1, 2), (20, 0))),
    # low bits, third bits, and in its upper half scales and d; the other unit's first low bits
    "Q3_K": UnitWords(110, ((8, 8), (0, 0), (20, 0)), ((16, -8),)),
    # two pieces of codes; d and dmin, scales and minima in its lower half
    "Q4_K": UnitWords(144, ((4, 16), (12, 16), (0, 0)), ()),
    # low bits of 32 values, of the next 32, high bits; the words after them; scales, d
    "Q6_K": UnitWords(
        210,
        ((0, 16), (8, 16), (32, 8)),
        ((16, 16), (40, 8), (48, 2), (49, 2), (50, 2), (52, 0)),
    ),
    # four blocks of 34 bytes; the words between the first two and the last two
    "Q8_0": UnitWords(272, ((0, 34), (9, 34), (17, 34), (26, 34)), ((8, 34), (25, 34))),
}


def constraints(name: str) -> str:
    """Return the operand constraints of `assembly(name)`."""
    n_inputs = len(ROW) + len(UNITS[name].tensors) + len(UNITS[name].scalars) + 1
    return ",".join(["=r"] * WORDS + ["r"] * WORDS * n_inputs)


def assembly(name: str) -> str:
    """Return PTX whose first output is the f32 bits of a unit's sum, the seven others 0.

    Inputs, eight registers each: the row's codes of four groups, its scales and sums; the tensors
    and the scalars of `UNITS[name]` (a scalar eight times); the place: 4 for a second unit, plus
    16 where the block begins two bytes behind a multiple of four.
    """
    unit = UNITS[name]
    lines = PtxLines(len(unit.tensors), len(unit.scalars))
    _BODIES[name](lines)
    zeros = " ".join(f"mov.b32 ${word}, 0;" for word in range(1, WORDS))
    return "\n".join([lines.declarations(), *lines.text, zeros, "}"])


def _q2_k(ptx: PtxLines) -> None:
    words, scale_words = ptx.words("t0"), (ptx.word("s0"), ptx.word("s1"))
    scales = [ptx.both(word, 0x0F0F0F0F) for word in scale_words]
    minima = [ptx.both(ptx.right(word, 4), 0x0F0F0F0F) for word in scale_words]
    upper = [ptx.right(word, 4) for word in words]
    totals, minimum = ["", ""], ""
    for group in range(4):
        # Odd groups stay four times too large.
        mask = 0x0C0C0C0C if group % 2 else 0x03030303
        values = [ptx.both(word, mask) for word in (upper if group > 1 else words)]
        whole = ptx.pair_dot(_pair(ptx, values, group), scales[group // 2], group)
        totals[group % 2] = ptx.add(totals[group % 2], whole, ptx.scale(group))
        whole = ptx.pair_dot(ptx.sums(group), minima[group // 2], group)
        minimum = ptx.add(minimum, whole, ptx.scale(group))
    total = ptx.do("fma.rn.f32", totals[1], "0f3E800000", totals[0])
    _affine(ptx, total, minimum, ptx.word("s2"))


def _q3_k(ptx: PtxLines) -> None:
    place = ptx.word("place")
    shift = ptx.both(place, 16)
    tail = [ptx.word("t2", number) for number in (4, 5, 6, 7)]
    other = ptx.word("s0")
    words = ptx.funnel([*ptx.words("t0"), _chosen(ptx, tail[0], other)], shift)
    # Moved by four more bits, a second unit's third bits and its scales' fields are the first's.
    behind = _chosen(ptx, other, ptx.word("t0"))
    thirds = ptx.funnel([*ptx.words("t1"), behind], place)
    first, second, high = ptx.funnel(tail, place)
    scales = [
        _minus_32(ptx, ptx.either(ptx.both(low, 0x0F0F0F0F), ptx.both(top, 0x30303030)))
        for low, top in ((first, ptx.left(high, 4)), (second, ptx.left(high, 2)))
    ]
    total = ""
    for group in range(4):
        low = [ptx.both(ptx.right(word, 2 * group), 0x03030303) for word in words]
        third = [ptx.both(_moved(ptx, word, 2 - group), 0x04040404) for word in thirds]
        values = [ptx.either(a, b) for a, b in zip(low, third, strict=True)]
        whole = ptx.pair_dot(_pair(ptx, values, group), scales[group // 2], group, "s32.s32")
        four = ptx.pair_dot(ptx.sums(group), scales[group // 2], group, "s32.s32")
        total = ptx.add(total, ptx.do("mad.lo.s32", four, -4, whole), ptx.scale(group))
    ptx.result(ptx.do("mul.f32", total, ptx.half(ptx.right(tail[3], shift))))


def _q4_k(ptx: PtxLines) -> None:
    first, second, third = (ptx.word("t2", number) for number in (1, 2, 3))
    scales, minima = (
        _chosen(
            ptx,
            ptx.either(ptx.both(low, 0x0F0F0F0F), ptx.both(ptx.right(word, 2), 0x30303030)),
            ptx.both(word, 0x3F3F3F3F),
        )
        for word, low in ((first, third), (second, ptx.right(third, 4)))
    )
    totals, minimum = ["", ""], ""
    for group in range(4):
        # Odd groups stay sixteen times too large.
        mask = 0xF0F0F0F0 if group % 2 else 0x0F0F0F0F
        values = [ptx.both(word, mask) for word in ptx.words(f"t{group // 2}")]
        scale = ptx.do("prmt.b32", scales, 0, f"0x{0x4440 + group:x}")
        whole = ptx.do("mul.lo.s32", ptx.dot(values, ptx.words(f"x{group}")), scale)
        totals[group % 2] = ptx.add(totals[group % 2], whole, ptx.scale(group))
        twice = ptx.do("prmt.b32", minima, 0, f"0x{0x4400 + 17 * group:x}")
        minimum = ptx.add(minimum, ptx.pair_dot(ptx.sums(group), twice, 0), ptx.scale(group))
    total = ptx.do("fma.rn.f32", totals[1], "0f3D800000", totals[0])
    _affine(ptx, total, minimum, ptx.word("t2"))


def _q6_k(ptx: PtxLines) -> None:
    shift = ptx.both(ptx.word("place"), 16)
    lows = (
        ptx.funnel([*ptx.words("t0"), ptx.word("t1")], shift),
        ptx.funnel([*ptx.words("t1"), ptx.word("s0")], shift),
    )
    highs = ptx.funnel([*ptx.words("t2"), ptx.word("s1")], shift)
    scales = ptx.funnel([ptx.word(f"s{i}") for i in (2, 3, 4)], shift)
    total = ""
    for group in range(4):
        low = [ptx.both(ptx.right(w, 4 * (group // 2)), 0x0F0F0F0F) for w in lows[group % 2]]
        high = [ptx.both(_moved(ptx, word, 4 - 2 * group), 0x30303030) for word in highs]
        values = [ptx.either(a, b) for a, b in zip(low, high, strict=True)]
        codes, word = ptx.words(f"x{group}"), scales[group // 2]
        whole = "0"
        for half in (0, 1):
            part = slice(4 * half, 4 * half + 4)
            scale = ptx.do("bfe.s32", word, 8 * (2 * (group % 2) + half), 8)
            whole = ptx.do("mad.lo.s32", ptx.dot(values[part], codes[part]), scale, whole)
        offset = ptx.pair_dot(ptx.sums(group), word, group, "s32.s32")
        total = ptx.add(total, ptx.do("mad.lo.s32", offset, -32, whole), ptx.scale(group))
    ptx.result(ptx.do("mul.f32", total, ptx.half(ptx.right(ptx.word("s5"), shift))))


def _q8_0(ptx: PtxLines) -> None:
    total = ""
    for group in range(4):
        words, between = ptx.words(f"t{group}"), ptx.word(f"s{group // 2}")
        scale = ptx.half(between, upper=True) if group % 2 else ptx.half(words[0])
        if group % 2 == 0:  # begins with its scale, two bytes
            words = ptx.funnel([*words, between], 16)
        whole = ptx.dot(words, ptx.words(f"x{group}"), "s32.s32")
        total = ptx.add(total, whole, ptx.do("mul.f32", scale, ptx.scale(group)))
    ptx.result(total)


def _pair(ptx: PtxLines, values: list[str], group: int) -> str:
    """The dots of a group's two halves of 16 values as two i16 of one word."""
    codes = ptx.words(f"x{group}")
    first, second = ptx.dot(values[:4], codes[:4]), ptx.dot(values[4:], codes[4:])
    return ptx.do("prmt.b32", first, second, "0x5410")


def _moved(ptx: PtxLines, word: str, left: int) -> str:
    return ptx.left(word, left) if left > 0 else ptx.right(word, -left)


def _minus_32(ptx: PtxLines, word: str) -> str:
    """Four bytes below 64, less 32 each; the set top bits keep borrows inside their byte."""
    raised = ptx.do("or.b32", word, "0x80808080")
    return ptx.do("xor.b32", ptx.do("sub.u32", raised, "0x20202020"), "0x80808080")


def _chosen(ptx: PtxLines, second: str, first: str) -> str:
    """`second` in a second unit, else `first`."""
    flag, to = ptx.both(ptx.word("place"), 4), ptx.fresh("r")
    ptx.text.append(f"setp.ne.u32 p, {flag}, 0;")
    ptx.text.append(f"selp.b32 {to}, {second}, {first}, p;")
    return to


def _affine(ptx: PtxLines, total: str, minimum: str, word: str) -> None:
    """Leave d * total - dmin * minimum, both scales in one word."""
    taken = ptx.do("neg.f32", ptx.do("mul.f32", minimum, ptx.half(word, upper=True)))
    ptx.result(ptx.do("fma.rn.f32", total, ptx.half(word), taken))


_BODIES: dict[str, Callable[[PtxLines], None]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
    "Q8_0": _q8_0,
}
