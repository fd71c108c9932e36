"""Straight-line PTX under construction, for inline assembly over eight registers an input."""

from __future__ import annotations

from itertools import pairwise

WORDS = 8  # registers of each input and of the output
ROW = ("x0", "x1", "x2", "x3", "side")  # four groups of codes, then their scales and sums


class PtxLines:
    """PTX under construction: operand names, fresh registers, and the lines so far."""

    def __init__(self, n_tensors: int, n_scalars: int) -> None:
        names = [*ROW, *(f"t{i}" for i in range(n_tensors)), *(f"s{i}" for i in range(n_scalars))]
        self._first = {name: WORDS * (1 + i) for i, name in enumerate([*names, "place"])}
        self._count = {"r": 0, "f": 0}
        self.text: list[str] = []

    def word(self, name: str, number: int = 0) -> str:
        """Operand `number` of an input."""
        return f"${self._first[name] + number}"

    def fresh(self, kind: str) -> str:
        """A register of 32 bits ("r") or of an f32 ("f") that nothing else uses."""
        self._count[kind] += 1
        return f"{kind}{self._count[kind] - 1}"

    def do(self, operation: str, *inputs: str | int, to: str = "") -> str:
        """Emit one operation and return the register that it writes, fresh unless given."""
        to = to or self.fresh("f" if ".f32" in operation else "r")
        self.text.append(f"{operation} {', '.join([to, *map(str, inputs)])};")
        return to

    def both(self, word: str, mask: int) -> str:
        """The bits of a word that a mask keeps."""
        return self.do("and.b32", word, f"0x{mask:08x}")

    def either(self, first: str, second: str) -> str:
        """The bits of both words."""
        return self.do("or.b32", first, second)

    def right(self, word: str, count: int | str) -> str:
        """A word moved right, zeros from above."""
        return self.do("shr.u32", word, count) if count else word

    def left(self, word: str, count: int) -> str:
        """A word moved left."""
        return self.do("shl.b32", word, count) if count else word

    def funnel(self, words: list[str], count: str | int) -> list[str]:
        """Each word but the last, with its upper neighbour's bits moved in from above."""
        pairs = pairwise(words)
        return [self.do("shf.r.wrap.b32", low, high, count) for low, high in pairs]

    def words(self, name: str) -> list[str]:
        """The eight operands of an input."""
        return [self.word(name, number) for number in range(WORDS)]

    def dot(self, values: list[str], codes: list[str], types: str = "u32.s32") -> str:
        """Sum of the byte products of words."""
        total = "0"
        for value, code in zip(values, codes, strict=True):
            total = self.do(f"dp4a.{types}", value, code, total)
        return total

    def half(self, word: str, upper: bool = False) -> str:
        """The f32 of a word's lower or upper f16."""
        word = self.right(word, 16 if upper else 0)
        to = self.fresh("f")
        self.text.append(f"mov.b32 {{low, high}}, {word};")
        self.text.append(f"cvt.f32.f16 {to}, low;")
        return to

    def pair_dot(self, pair: str, bytes_: str, group: int, types: str = "s32.u32") -> str:
        """Two i16 times two bytes of a word: the lower two for even groups, else the upper two."""
        return self.do(f"dp2a.{'hi' if group % 2 else 'lo'}.{types}", pair, bytes_, 0)

    def add(self, total: str, whole: str, scale: str) -> str:
        """The total plus a whole number times a scale; the total is empty at first."""
        value = self.do("cvt.rn.f32.s32", whole)
        if not total:
            return self.do("mul.f32", value, scale)
        return self.do("fma.rn.f32", value, scale, total)

    def scale(self, group: int) -> str:
        """The row's f32 scale of a group."""
        return self.do("mov.b32", self.word("side", group), to=self.fresh("f"))

    def sums(self, group: int) -> str:
        """The row's two sums of 16 codes of a group."""
        return self.word("side", 4 + group)

    def result(self, value: str) -> None:
        """Leave an f32 as the first output."""
        self.text.append(f"mov.b32 $0, {value};")

    def declarations(self) -> str:
        """Open the scope and declare what `do` used."""
        counts = f".reg .b32 r<{self._count['r'] + 1}>; .reg .f32 f<{self._count['f'] + 1}>;"
        return f"{{ {counts} .reg .b16 low, high; .reg .pred p;"
