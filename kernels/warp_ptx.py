"""PTX of warps that work on what bulk copies brought into shared memory.

Invariants: shared memory is addressed from `global_smem` on; what lies there is a `bulk_plan.py`.
Operand $0 of each text is a word that nobody reads, $1 the thread's number. Source: PTX ISA.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

from .ptx_lines import PtxLines

BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
MMA = "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32"
Copy = tuple[str, str, str, int]  # barrier's and target's address, source, bytes


class Ptx(str):
    """A text whose repr is a digest: each launch makes a key of its constants' reprs."""

    __slots__ = ()

    def __repr__(self) -> str:
        return _digest(self)


@lru_cache(maxsize=64)
def _digest(text: str) -> str:
    return f"ptx_{hashlib.sha256(text.encode()).hexdigest()[:32]}"


class WarpPtx(PtxLines):
    """PTX under construction for whole warps."""

    def __init__(self) -> None:
        super().__init__(0, 0)
        self._count |= {"l": 0, "p": 0, "L": 0}
        self.base = self.do("mov.u32", "global_smem")

    def done(self, *, result: bool = False) -> str:
        """Return the text, which ends with a barrier of the program, or leaves a result in $0."""
        ending = ["}"] if result else ["bar.sync 0;", "mov.b32 $0, 0; }"]
        return Ptx("\n".join([self.declarations(), *self.text, *ending]))

    def declarations(self) -> str:
        """Open the scope and declare what was used."""
        n = {kind: count + 1 for kind, count in self._count.items()}
        return (
            f"{{ .reg .b32 r<{n['r']}>; .reg .f32 f<{n['f']}>; .reg .b64 l<{n['l']}>; "
            f".reg .pred p<{n['p']}>; .reg .b16 low, high;"
        )

    def lanes(self) -> tuple[str, str, str, str]:
        """The lane, the warp, and a lane's place in a product: row g = 0 .. 7, quad q = 0 .. 3."""
        lane, warp = self.do("and.b32", "$1", 31), self.right("$1", 5)
        return lane, warp, self.right(lane, 2), self.do("and.b32", lane, 3)

    def at(self, number: str, step: int, start: str) -> str:
        """An address `number` steps behind another one."""
        return self.do("mad.lo.u32", number, step, start)

    def wide_at(self, number: str | int, step: int, start: str) -> str:
        """The same of 64 bits."""
        to = self.fresh("l")
        if isinstance(number, int):
            self.text.append(f"add.s64 {to}, {start}, {number * step};")
        else:
            self.text.append(f"mad.wide.u32 {to}, {number}, {step}, {start};")
        return to

    def flag(self, condition: str, a: str, b: str | int) -> str:
        """A predicate."""
        to = self.fresh("p")
        self.text.append(f"setp.{condition} {to}, {a}, {b};")
        return to

    def label(self) -> str:
        """A name to jump to."""
        return f"BULK_{self.fresh('L')}"

    def load(self, at: str, offset: int, kind: str = "b32") -> str:
        """What lies in shared memory."""
        to = self.fresh("f" if kind == "f32" else "r")
        self.text.append(f"ld.shared.{kind} {to}, [{at}+{offset}];")
        return to

    def load_half(self, at: str, offset: int) -> str:
        """The f32 of an f16 in shared memory."""
        to = self.fresh("f")
        self.text.append(f"ld.shared.b16 low, [{at}+{offset}];")
        self.text.append(f"cvt.f32.f16 {to}, low;")
        return to

    def halves(self, word: str) -> tuple[str, str]:
        """The f32 of both f16 of a word."""
        first, second = self.fresh("f"), self.fresh("f")
        self.text.append(f"mov.b32 {{low, high}}, {word};")
        self.text += [f"cvt.f32.f16 {first}, low;", f"cvt.f32.f16 {second}, high;"]
        return first, second

    def store(self, at: str, offset: int, value: str, guard: str = "") -> None:
        """Write a word to shared memory."""
        self.text.append(f"{guard} st.shared.b32 [{at}+{offset}], {value};")

    def other(self, value: str, distance: int) -> str:
        """What the lane at a distance has."""
        to = self.fresh(value[0])
        self.text.append(f"shfl.sync.bfly.b32 {to}, {value}, {distance}, 31, -1;")
        return to

    def from_lane(self, value: str, lane: str) -> str:
        """What a lane has."""
        to = self.fresh(value[0])
        self.text.append(f"shfl.sync.idx.b32 {to}, {value}, {lane}, 31, -1;")
        return to

    def quad_sum(self, value: str) -> str:
        """Sum over the four lanes of a row."""
        for distance in (1, 2):
            value = self.do("add.f32", value, self.other(value, distance))
        return value

    def copy(self, copies: Sequence[Copy], guard: str) -> None:
        """Ask for bytes of which a barrier tells when they are there."""
        total: dict[str, int] = {}
        for barrier, _, _, n_bytes in copies:
            total[barrier] = total.get(barrier, 0) + n_bytes
        for barrier, n_bytes in total.items():
            self.text.append(
                f"{guard} mbarrier.arrive.expect_tx.shared.b64 {self.fresh('l')}, [{barrier}], "
                f"{n_bytes};"
            )
        for barrier, target, source, n_bytes in copies:
            self.text.append(f"{guard} {BULK} [{target}], [{source}], {n_bytes}, [{barrier}];")

    def wait(self, barrier: str) -> None:
        """Wait until all bytes of a barrier are there."""
        label, there = self.label(), self.fresh("p")
        self.text.append(f"{label}: mbarrier.try_wait.parity.shared.b64 {there}, [{barrier}], 0;")
        self.text.append(f"@!{there} bra {label};")

    def product(self, a: Sequence[str], b: Sequence[str], c: Sequence[str]) -> list[str]:
        """The sums c of 16 rows, eight columns, plus u8 a times s8 b over 32 values."""
        d = [self.fresh("r") for _ in range(4)]
        sets = ", ".join("{" + ", ".join(v) + "}" for v in (d, a, b, c))
        self.text.append(f"{MMA} {sets};")
        return d

    def masks(self, g: str) -> list[str]:
        """All ones where a lane's column is 0 .. 7, else 0."""
        return [self.do("selp.b32", -1, 0, self.flag("eq.u32", g, column)) for column in range(8)]

    def spread(self, word: str, masks: Sequence[str]) -> list[tuple[str, str]]:
        """The codes of four chunks of 32, each half in a column of its own, zeros elsewhere."""
        v = [self.do("and.b32", word, mask) for mask in masks]
        return [(v[2 * chunk], v[2 * chunk + 1]) for chunk in range(4)]
