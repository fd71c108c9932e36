"""PTX of down in Q3_K: rows in shared memory times a q8_1 row, in whole numbers.

A product takes 32 values of 16 rows, the codes spread as in `bulk_q2_k.py`. In place a chunk's
values are 1, 4, 16 or 16 times too large; the offset of 4 is where the sums begin. The eight rows
of a lane's quad are eight apart, for then they lie in different banks. Blocks of 110 bytes begin at
even addresses: half of them are moved into place by two bytes. Sources: as for `bulk_q2_k.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from .bulk_plan import BulkPlan, begin_asm, end_asm, load_row_asm, sum_asm
from .warp_ptx import WarpPtx

BLOCK_BYTES = 110
ROWS = 64  # in a program
N_WARPS = 8
Unit = tuple[list[tuple[str, str]], str, list[str]]


@dataclass(frozen=True, slots=True)
class Down:
    """How a program works on its rows."""

    width: int  # a multiple of 256

    @property
    def blocks(self) -> int:
        """Super-blocks in a row."""
        return self.width // 256

    @property
    def pairs(self) -> bool:
        """Whether each part of a row is pairs of blocks, and the last block goes to all parts.

        Then which blocks are in place is the same for all rows of a warp, and no shift is wanted
        for them.
        """
        return self.blocks % 8 == 1 and self.blocks > 1

    @property
    def plan(self) -> BulkPlan:
        """Where things lie: one barrier for all rows."""
        parts = 4 if self.pairs else 2
        return BulkPlan(self.blocks * BLOCK_BYTES, ROWS, self.width, parts, 1)

    def begin(self) -> str:
        """Return PTX that asks for the rows: $2 is the first one's address."""
        n = ROWS // 2 * self.plan.row_bytes
        return begin_asm(self.plan, [(0, half * n, "$2", half * n, n) for half in (0, 1)])

    def token_row(self) -> str:
        """Return PTX that loads the q8_1 row: $2 its codes, $3 its sides."""
        return load_row_asm(self.plan, N_WARPS)

    def products(self) -> str:
        """Return PTX that leaves sums of rows."""
        return (_Pairs if self.pairs else _Halves)(self).text()

    def result(self) -> str:
        """Return PTX that gives the sum $0 of row $1; a warp for 32 rows goes on."""
        ptx = WarpPtx()
        end_asm(ptx, ROWS // 32)
        sum_asm(ptx, self.plan, ptx.at("$1", 4, ptx.base), 0, "$0")
        return ptx.done(result=True)


@dataclass(frozen=True, slots=True)
class _Place:
    """Addresses in a lane's first row."""

    row: str  # a block
    words: str  # of it, from an aligned word on
    shift: str | int  # bits from there to the block
    scales: str
    high: str  # upper bits of scales


class _Products:
    """The registers that all blocks use."""

    def __init__(self, how: Down) -> None:
        self.how, self.plan = how, how.plan
        self.ptx = ptx = WarpPtx()
        _, self.warp, self.g, self.q = ptx.lanes()
        left = ptx.left(ptx.do("min.u32", self.q, 2), 1)
        self.offset = ptx.do("neg.s32", ptx.do("shl.b32", "4", left))
        exponent = ptx.left(ptx.do("sub.u32", "127", left), 23)
        self.factor = ptx.do("mov.b32", exponent, to=ptx.fresh("f"))
        self.high_shift = ptx.left(ptx.right(self.q, 1), 1)
        self.masks = ptx.masks(self.g)
        self.codes = ptx.at(self.q, 4, ptx.at(self.g, self.plan.stride, ptx.base))
        self.sides = ptx.at(self.q, 4, ptx.base)

    def wait(self) -> None:
        self.ptx.wait(self.ptx.do("add.u32", self.ptx.base, self.plan.barriers))

    def place(self, row: str, words: str, shift: str | int) -> _Place:
        ptx, odd = self.ptx, self.ptx.do("and.b32", self.q, 1)
        return _Place(
            row, ptx.at(self.q, 4, words), shift, ptx.at(self.q, 2, row), ptx.at(odd, 2, row)
        )

    def unit(self, codes: str, sides: str, number: int) -> Unit:
        """Spread codes, a scale for fields in place, and where sums begin."""
        ptx, plan = self.ptx, self.plan
        word = ptx.load(codes, plan.codes + 16 * number)
        scale = ptx.load(sides, plan.sides + 32 * number, "f32")
        sums = ptx.load(sides, plan.code_sums(number))
        first = ptx.do("mul.lo.s32", ptx.do("bfe.s32", sums, 0, 16), self.offset)
        second = ptx.do("mul.lo.s32", ptx.do("shr.s32", sums, 16), self.offset)
        start = [first, second, first, second]
        return ptx.spread(word, self.masks), ptx.do("mul.f32", scale, self.factor), start

    def words(self, place: _Place, offset: int, firsts: tuple[int, ...]) -> list[str]:
        """Words q and q + 4 of runs of eight."""
        ptx, out = self.ptx, []
        for first in firsts:
            for k in (0, 1):
                at = offset + 4 * (first + 4 * k)
                word = ptx.load(place.words, at)
                if place.shift != 0:
                    above = ptx.load(place.words, at + 4)
                    word = ptx.do("shf.r.wrap.b32", word, above, place.shift)
                out.append(word)
        return out

    def scale_word(self, place: _Place, offset: int) -> str:
        """Scales of a lane's two groups in both halves of a block, signed."""
        ptx = self.ptx
        low = ptx.load(place.scales, offset + 96, "u16")
        high = ptx.right(ptx.load(place.high, offset + 104, "u16"), self.high_shift)
        word = ptx.both(ptx.either(low, ptx.left(low, 12)), 0x0F0F0F0F)
        top = ptx.both(ptx.do("prmt.b32", ptx.left(high, 4), high, "0x5410"), 0x30303030)
        # Less 32 each; the set top bits keep borrows inside their byte.
        raised = ptx.either(ptx.either(word, top), "0x80808080")
        return ptx.do("xor.b32", ptx.do("sub.u32", raised, "0x20202020"), "0x80808080")

    def chunks(self, flat: list[str], thirds: list[str], half: int, unit: Unit) -> list[str]:
        """Sums of four chunks; words in the order q of row 0, of row 1, q + 4 of each."""
        ptx, (spread, _, c) = self.ptx, unit
        if half == 0:
            moved = [[ptx.left(word, n) for word in thirds] for n in (2, 3, 4)]
        else:
            moved = [[ptx.right(word, n) for word in thirds] for n in (2, 1, 0)]
        quarter = [ptx.right(word, 2) for word in flat]
        fields = (
            (flat, 0x03030303, moved[0], 0x04040404),
            (flat, 0x0C0C0C0C, moved[1], 0x10101010),
            (flat, 0x30303030, moved[2], 0x40404040),
            (quarter, 0x30303030, moved[1], 0x40404040),
        )
        for chunk, (lows, mask, tops, top_mask) in enumerate(fields):
            a = [
                ptx.either(ptx.both(low, mask), ptx.both(top, top_mask))
                for low, top in zip(lows, tops, strict=True)
            ]
            c = ptx.product(a, spread[chunk], c)
        return c

    def scaled(self, c: list[str], r: int, scales: str, half: int) -> str:
        """The sums of row r times their scales."""
        ptx = self.ptx
        first, second = (
            ptx.do("prmt.b32", scales, 0, f"0x{0x8880 + 0x1111 * (2 * half + i):x}") for i in (0, 1)
        )
        whole = ptx.do("mul.lo.s32", c[2 * r], first)
        return ptx.do("cvt.rn.f32.s32", ptx.do("mad.lo.s32", c[2 * r + 1], second, whole))

    def block(
        self, place: _Place, words: int, row: int, units: list[Unit]
    ) -> list[tuple[str, str]]:
        """Scale and sum of one block in two rows; the second row is two further on.

        words, row  offsets of the block in the first row from what the place names
        """
        ptx, far = self.ptx, 2 * self.plan.row_bytes
        w = [self.words(place, words + r * far, (0, 8, 16)) for r in (0, 1)]
        scales = [self.scale_word(place, row + r * far) for r in (0, 1)]
        d = [ptx.load_half(place.row, row + r * far + 108) for r in (0, 1)]
        totals = ["", ""]
        for half, unit in enumerate(units):
            flat = [w[r][2 + 2 * half + k] for k in (0, 1) for r in (0, 1)]
            thirds = [w[r][k] for k in (0, 1) for r in (0, 1)]
            c = self.chunks(flat, thirds, half, unit)
            for r in (0, 1):
                totals[r] = self.add(totals[r], self.scaled(c, r, scales[r], half), unit[1])
        return list(zip(d, totals, strict=True))

    def add(self, total: str, value: str, factor: str) -> str:
        """A total, empty at first, plus a product."""
        if not total:
            return self.ptx.do("mul.f32", value, factor)
        return self.ptx.do("fma.rn.f32", value, factor, total)

    def end(self, totals: dict[int, str], row_number: str, part: str) -> str:
        """Leave the sums of rows, by their distance from a lane's first one."""
        ptx = self.ptx
        at = ptx.at(part, 4 * self.plan.n_rows, ptx.at(row_number, 4, ptx.base))
        sums = {row: ptx.quad_sum(total) for row, total in totals.items()}
        first = ptx.flag("eq.u32", self.q, 0)
        for row, total in sums.items():
            ptx.store(at, self.plan.sums + 4 * row, total, f"@{first}")
        return ptx.done()


class _Halves(_Products):
    """Any number of blocks: four tiles of rows by two parts of the columns."""

    def text(self) -> str:
        ptx, blocks = self.ptx, self.how.blocks
        tile, part = ptx.do("and.b32", self.warp, 3), ptx.right(self.warp, 2)
        # Tiles 0 .. 3 begin at rows 0, 4, 1, 5; their second eight rows two further on.
        first = ptx.at(ptx.do("and.b32", tile, 1), 4, ptx.right(tile, 1))
        number = ptx.at(self.g, 8, first)
        longer = (blocks + 1) // 2
        row = ptx.at(number, self.plan.row_bytes, ptx.base)
        row = ptx.at(part, longer * BLOCK_BYTES, row)
        codes, sides = ptx.at(part, longer * 32, self.codes), ptx.at(part, longer * 64, self.sides)
        places = []
        for odd in (0, 1):
            at = ptx.do("add.u32", row, odd * BLOCK_BYTES)
            shift = ptx.left(ptx.do("and.b32", at, 2), 3)
            places.append(self.place(row, ptx.both(at, 0xFFFFFFFC), shift))
        self.wait()
        totals = [ptx.do("mov.f32", "0f00000000") for _ in (0, 1)]
        skip = ptx.label()
        for block in range(longer):
            if block == blocks - longer:  # the second part has one less
                ptx.text.append(f"@{ptx.flag('ne.u32', part, 0)} bra {skip};")
            units = [self.unit(codes, sides, 2 * block + half) for half in (0, 1)]
            found = self.block(places[block % 2], 220 * (block // 2), BLOCK_BYTES * block, units)
            for r, (d, total) in enumerate(found):
                ptx.do("fma.rn.f32", d, total, totals[r], to=totals[r])
        ptx.text.append(f"{skip}:")
        return self.end({0: totals[0], 2: totals[1]}, number, part)


class _Pairs(_Products):
    """8 n + 1 blocks: odd and even rows by four parts of the columns."""

    def text(self) -> str:
        ptx = self.ptx
        odd, part = ptx.do("and.b32", self.warp, 1), ptx.right(self.warp, 1)
        number = ptx.at(self.g, 8, odd)
        row = ptx.at(number, self.plan.row_bytes, ptx.base)
        self.wait()
        totals = ["", "", "", ""]
        for eight in range(self.how.blocks // 8):
            # Blocks of the row's own parity are in place, those of the other two bytes behind.
            for which, shift in ((odd, 0), (ptx.do("xor.b32", odd, 1), 16)):
                number_of = ptx.do("add.u32", ptx.at(part, 2, which), 8 * eight)
                self._pair(row, number_of, shift, totals)
        for i, (d, total) in enumerate(self._last(row, odd, part)):
            totals[i] = self.add(totals[i], total, d)
        return self.end({2 * i: total for i, total in enumerate(totals)}, number, part)

    def _pair(self, row0: str, block: str, shift: int, totals: list[str]) -> None:
        """Add a block's sums in four rows to their totals."""
        ptx = self.ptx
        row = ptx.at(block, BLOCK_BYTES, row0)
        place = self.place(row, ptx.do("sub.u32", row, shift // 8), shift)
        codes, sides = ptx.at(block, 32, self.codes), ptx.at(block, 64, self.sides)
        units = [self.unit(codes, sides, half) for half in (0, 1)]
        for tile in (0, 1):
            more = 4 * tile * self.plan.row_bytes
            for r, (d, total) in enumerate(self.block(place, more, more, units)):
                totals[2 * tile + r] = self.add(totals[2 * tile + r], total, d)

    def _last(self, row0: str, odd: str, part: str) -> list[tuple[str, str]]:
        """A part has one half of the last block for one of the two tiles, zeros for the other."""
        ptx, blocks = self.ptx, self.how.blocks
        tile, half = ptx.do("and.b32", part, 1), ptx.right(part, 1)
        row = ptx.do("add.u32", row0, (blocks - 1) * BLOCK_BYTES)
        row = ptx.at(tile, 4 * self.plan.row_bytes, row)
        start = ptx.do("sub.u32", row, ptx.left(odd, 1))
        shift = ptx.left(odd, 4)
        place, lows = (self.place(row, at, shift) for at in (start, ptx.at(half, 32, start)))
        codes, sides = ptx.at(half, 16, self.codes), ptx.at(half, 32, self.sides)
        unit = self.unit(codes, sides, 2 * (blocks - 1))
        far = 2 * self.plan.row_bytes
        third = [self.words(place, r * far, (0,)) for r in (0, 1)]
        flat = [self.words(lows, r * far, (8,)) for r in (0, 1)]
        four, sixteen = ptx.left(half, 2), ptx.left(half, 4)
        thirds = [ptx.right(third[r][k], four) for k in (0, 1) for r in (0, 1)]
        c = self.chunks([flat[r][k] for k in (0, 1) for r in (0, 1)], thirds, 0, unit)
        out = []
        none = ptx.flag("ne.u32", tile, 0)
        for r in (0, 1):
            scales = ptx.right(self.scale_word(place, r * far), sixteen)
            d = ptx.load_half(row, r * far + 108)
            out.append((d, ptx.do("mul.f32", self.scaled(c, r, scales, 0), unit[1])))
        zero = "0f00000000"
        first = [(d, ptx.do("selp.f32", zero, total, none)) for d, total in out]
        return first + [(d, ptx.do("selp.f32", total, zero, none)) for d, total in out]
