"""PTX of gate and up in Q2_K: rows in shared memory times a q8_1 row, in whole numbers.

A tile is eight rows of gate and the same eight of up. A product takes 32 values of each; the codes
of the token's row stand in the column of their group of 16, zeros elsewhere, so that a lane is left
with the sums whose scales it multiplies. Fields stay in place where they can: odd groups are four
times too large. The minima are one more product, 16 of them by the sums in two parts that fit a
byte. Sources: ggml block layouts (`formats/`); PTX ISA, fragments of m16n8k32.
"""

from __future__ import annotations

from dataclasses import dataclass

from .bulk_plan import BulkPlan, begin_asm, end_asm, round_row_asm, sum_asm
from .warp_ptx import WarpPtx

BLOCK_BYTES = 84
ROWS = 32  # of each matrix in a program: one group of activated values
TILES, PARTS = 4, 4
TILES_A_WARP = 2  # that share the token's codes, spread once
N_WARPS = PARTS * TILES // TILES_A_WARP
Row = tuple[list[list[tuple[str, str]]], list[str], list[str], tuple[str, str]]


@dataclass(frozen=True, slots=True)
class GateUp:
    """How a program works on its rows."""

    hidden: int  # a multiple of 1024, for a block a part

    @property
    def plan(self) -> BulkPlan:
        """Where things lie: a barrier for each tile."""
        return BulkPlan(self.hidden // 256 * BLOCK_BYTES, 2 * ROWS, self.hidden, PARTS, TILES)

    def begin(self) -> str:
        """Return PTX that asks for tiles: $2 and $3 are the first rows of gate and up."""
        n = 8 * self.plan.row_bytes
        copies = [(t, (2 * t + r) * n, f"${2 + r}", t * n, n) for t in range(TILES) for r in (0, 1)]
        return begin_asm(self.plan, copies)

    def token_row(self, *, bf16: bool) -> str:
        """Return PTX that rounds the token's row at $2, of bf16 or f32."""
        return round_row_asm(self.plan, N_WARPS, bf16=bf16)

    def products(self) -> str:
        """Return PTX that leaves sums of rows."""
        return _Products(self).text()

    def result(self) -> str:
        """Return PTX that gives gate ($0) and up ($1) of row $2; the first warp goes on alone."""
        ptx = WarpPtx()
        end_asm(ptx, 1)
        at = ptx.at(ptx.right("$2", 3), 64, ptx.at(ptx.do("and.b32", "$2", 7), 4, ptx.base))
        for r in (0, 1):
            sum_asm(ptx, self.plan, at, 32 * r, f"${r}")
        return ptx.done(result=True)


class _Products:
    """The registers that all blocks use."""

    def __init__(self, how: GateUp) -> None:
        self.plan = how.plan
        self.ptx = ptx = WarpPtx()
        _, warp, self.g, self.q = ptx.lanes()
        self.part = ptx.do("and.b32", warp, PARTS - 1)
        self.tile = ptx.do("mul.lo.u32", ptx.right(warp, 2), TILES_A_WARP)  # the first one
        self.blocks = how.hidden // 256 // PARTS  # of a part
        row, base, q = self.plan.row_bytes, ptx.base, self.q
        first = ptx.at(self.tile, 16 * row, ptx.at(self.g, row, base))
        self.row = ptx.at(self.part, self.blocks * BLOCK_BYTES, first)
        self.words, self.scales = ptx.at(q, 4, self.row), ptx.at(q, 2, self.row)
        codes = ptx.at(q, 4, ptx.at(self.g, self.plan.stride, base))
        self.codes = ptx.at(self.part, self.blocks * 32, codes)
        sides = ptx.at(self.part, self.blocks * 64, base)
        self.sides = ptx.at(q, 4, sides)
        # Column g of the minima's product: half g % 2 of a block, group g // 2 of it.
        half, group = ptx.do("and.b32", self.g, 1), ptx.right(self.g, 1)
        self.group_sums = ptx.at(half, 32, ptx.at(group, 4, sides))
        chosen = ptx.do("selp.b32", "0x4420", "0x2044", ptx.flag("eq.u32", half, 0))
        self.choice = ptx.do("selp.b32", chosen, "0x4444", ptx.flag("eq.u32", group, q))
        self.masks = ptx.masks(self.g)
        even = ptx.flag("eq.u32", ptx.do("and.b32", q, 1), 0)
        self.factor = ptx.do("selp.f32", "0f3F800000", "0f3E800000", even)
        self.zero = ptx.do("mov.b32", 0)
        self.totals: dict[tuple[int, int], str] = {}

    def text(self) -> str:
        ptx = self.ptx
        barriers = ptx.at(self.tile, 8, ptx.base)
        for t in range(TILES_A_WARP):
            ptx.wait(ptx.do("add.u32", barriers, self.plan.barriers + 8 * t))
        for block in range(self.blocks):
            row = self._row(block)
            for t in range(TILES_A_WARP):
                self._block(block, t, row)
        at = ptx.at(self.tile, 64, ptx.at(self.g, 4, ptx.base))
        at = ptx.at(self.part, 4 * self.plan.n_rows, at)
        sums = {key: ptx.quad_sum(total) for key, total in self.totals.items()}
        first = ptx.flag("eq.u32", self.q, 0)
        for (t, r), total in sums.items():
            ptx.store(at, self.plan.sums + 64 * t + 32 * r, total, f"@{first}")
        return ptx.done()

    def _row(self, block: int) -> Row:
        """What the token's row gives to one block: codes, scales, and sums for the minima."""
        ptx, plan = self.ptx, self.plan
        units = (2 * block, 2 * block + 1)
        spread = [ptx.spread(ptx.load(self.codes, plan.codes + 16 * u), self.masks) for u in units]
        scales = [ptx.load(self.sides, plan.sides + 32 * u, "f32") for u in units]
        in_place = [ptx.do("mul.f32", scale, self.factor) for scale in scales]
        sums = ptx.load(self.group_sums, plan.code_sums(units[0]))
        # A sum is 16 high + low parts: |high| < 128, low < 16.
        low, high = ptx.both(sums, 0x000F000F), ptx.both(ptx.right(sums, 4), 0x00FF00FF)
        chosen = (ptx.do("prmt.b32", low, 0, self.choice), ptx.do("prmt.b32", high, 0, self.choice))
        return spread, scales, in_place, chosen

    def _block(self, block: int, t: int, row: Row) -> None:
        """Add the products of both rows of one block to their totals."""
        ptx, (spread, scales, in_place, sums) = self.ptx, row
        at = [(16 * t + 8 * r) * self.plan.row_bytes + block * BLOCK_BYTES for r in (0, 1)]
        words = [
            [ptx.load(self.words, at[r] + 16 + 32 * half + 16 * k) for k in (0, 1) for r in (0, 1)]
            for half in (0, 1)
        ]
        scale_words = [self._scale_word(at[r]) for r in (0, 1)]
        low = [ptx.both(word, 0x0F0F0F0F) for word in scale_words]
        wholes: list[list[str]] = [[], []]
        for half in (0, 1):
            c = self._chunks(words[half], spread[half])
            for r in (0, 1):
                pair = ptx.do("prmt.b32", c[2 * r], c[2 * r + 1], "0x5410")
                whole = ptx.pair_dot(pair, low[r], half)
                wholes[r].append(ptx.do("cvt.rn.f32.s32", whole))
        a = [ptx.both(ptx.right(word, 4), 0x0F0F0F0F) for word in scale_words]
        a += [ptx.both(word, 0xF0F0F0F0) for word in scale_words]  # for the high parts
        minima = [ptx.do("cvt.rn.f32.s32", v) for v in ptx.product(a, sums, [self.zero] * 4)]
        for r in (0, 1):
            value = self._both(wholes[r], in_place)
            minimum = self._both(minima[2 * r : 2 * r + 2], scales)
            d, d_min = ptx.halves(ptx.load(self.row, at[r] + 80))
            old = self.totals.get((t, r))
            total = ptx.do("fma.rn.f32", d, value, old) if old else ptx.do("mul.f32", d, value)
            taken = ptx.do("neg.f32", d_min)
            self.totals[t, r] = ptx.do("fma.rn.f32", taken, minimum, total)

    def _scale_word(self, at: int) -> str:
        """Scales of a lane's two groups in both halves of a block."""
        ptx, to = self.ptx, self.ptx.fresh("r")
        ptx.text.append(f"ld.shared.b16 low, [{self.scales}+{at}];")
        ptx.text.append(f"ld.shared.b16 high, [{self.scales}+{at + 8}];")
        ptx.text.append(f"mov.b32 {to}, {{low, high}};")
        return to

    def _chunks(self, flat: list[str], spread: list[tuple[str, str]]) -> list[str]:
        ptx, c = self.ptx, [self.zero] * 4
        upper = [ptx.right(word, 4) for word in flat]
        for chunk in range(4):
            mask = 0x0C0C0C0C if chunk % 2 else 0x03030303
            a = [ptx.both(word, mask) for word in (upper if chunk > 1 else flat)]
            c = ptx.product(a, spread[chunk], c)
        return c

    def _both(self, halves: list[str], scales: list[str]) -> str:
        value = self.ptx.do("mul.f32", halves[0], scales[0])
        return self.ptx.do("fma.rn.f32", halves[1], scales[1], value)
