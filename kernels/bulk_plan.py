"""Where a program's rows, the token's row and sums lie in shared memory, and what brings them.

Invariants: whole rows come by bulk copies, so each line of memory is touched once and no register
waits for it; lanes read words from there. Rows of codes are placed so that eight of them lie in
different banks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .warp_ptx import WarpPtx

SHARED_BYTES = 227 << 10  # a program's most on GPUs with bulk copies that we know
_SLICE = 256  # the compiler's allocation is made of such


@dataclass(frozen=True, slots=True)
class BulkPlan:
    """Byte offsets in shared memory, from `global_smem` on."""

    row_bytes: int
    n_rows: int
    k: int  # values of a row, a multiple of 128
    n_parts: int  # that a row's sum is made of
    n_barriers: int

    @property
    def units(self) -> int:
        """Units of 128 values in a row."""
        return self.k // 128

    @property
    def stride(self) -> int:
        """Bytes from one of the eight rows of codes to the next."""
        stride = self.units * 16
        while stride // 4 % 32 not in {4, 12, 20, 28}:
            stride += 16
        return stride

    @property
    def codes(self) -> int:
        """Codes of the q8_1 row."""
        return -(-self.row_bytes * self.n_rows // 16) * 16

    @property
    def sides(self) -> int:
        """Its scales and sums."""
        return self.codes + 8 * self.stride

    def code_sums(self, unit: int) -> int:
        """A unit's sums of 16 codes, two in a word."""
        return self.sides + 32 * unit + 16

    @property
    def barriers(self) -> int:
        """What bulk copies report to."""
        return self.sides + self.units * 32

    @property
    def sums(self) -> int:
        """Sums of rows [n_parts, n_rows] f32."""
        return -(-(self.barriers + 8 * self.n_barriers) // 16) * 16

    @property
    def slices(self) -> int:
        """Slices to allocate; the last one is the compiler's."""
        return -(-(self.sums + 4 * self.n_parts * self.n_rows) // _SLICE) + 1

    @property
    def n_bytes(self) -> int:
        """What is allocated."""
        return self.slices * _SLICE


def begin_asm(plan: BulkPlan, copies: Sequence[tuple[int, int, str, int, int]]) -> str:
    """Return PTX that makes barriers and asks for rows.

    copies  barrier, offset in shared memory, operand with an address, bytes behind it, bytes
    """
    ptx = WarpPtx()
    first, skip = ptx.flag("eq.u32", "$1", 0), ptx.label()
    ptx.text.append(f"@{ptx.flag('ne.u32', ptx.right('$1', 5), 0)} bra {skip};")
    for barrier in range(plan.n_barriers):
        at = plan.barriers + 8 * barrier
        ptx.text.append(f"@{first} mbarrier.init.shared.b64 [{ptx.base}+{at}], 1;")
    ptx.text.append(f"@{first} fence.mbarrier_init.release.cluster;")
    ptx.text.append("bar.warp.sync -1;")  # what follows reads them, for racecheck by all lanes
    barriers = [ptx.do("add.u32", ptx.base, plan.barriers + 8 * n) for n in range(plan.n_barriers)]
    addressed = [
        (barriers[n], ptx.do("add.u32", ptx.base, target), ptx.wide_at(more, 1, source), n_bytes)
        for n, target, source, more, n_bytes in copies
    ]
    ptx.copy(addressed, f"@{first}")
    ptx.text.append(f"{skip}:")
    return ptx.done()


def end_asm(ptx: WarpPtx, n_warps: int) -> None:
    """End the warps from a number on, that would but repeat the others; no barrier may follow."""
    thread = ptx.do("mov.u32", "%tid.x")
    ptx.text.append(f"@{ptx.flag('ge.u32', thread, 32 * n_warps)} exit;")


def sum_asm(ptx: WarpPtx, plan: BulkPlan, at: str, offset: int, to: str) -> None:
    """Add a row's parts, in their order, into an operand."""
    total = ""
    for part in range(plan.n_parts):
        one = ptx.load(at, plan.sums + 4 * part * plan.n_rows + offset, "f32")
        total = ptx.do("add.f32", total, one) if total else one
    ptx.text.append(f"mov.f32 {to}, {total};")


def round_row_asm(plan: BulkPlan, n_warps: int, *, bf16: bool) -> str:
    """Return PTX that rounds the row at $2 to q8_1, bit for bit as `q8_1_rows` does.

    A warp takes a unit, a lane four neighbouring values; all of a warp's loads come first.
    """
    ptx = WarpPtx()
    lane, warp, g, q = ptx.lanes()
    size = 2 if bf16 else 4
    at = ptx.wide_at(ptx.at(warp, 32, lane), 4 * size, "$2")
    rounds, rest = -(-plan.units // n_warps), plan.units % n_warps
    short = ptx.flag("lt.u32", warp, rest or n_warps)
    guards = ["" if unit + 1 < rounds else f"@{short}" for unit in range(rounds)]
    loaded = []
    for unit, guard in enumerate(guards):
        words = [ptx.do("mov.b32", 0) for _ in range(size)]
        offset = unit * n_warps * 128 * size
        ptx.text.append(f"{guard} ld.global.v{size}.b32 {{{', '.join(words)}}}, [{at}+{offset}];")
        loaded.append(words)
    code_at = ptx.at(warp, 16, ptx.at(q, 4, ptx.at(g, plan.stride, ptx.base)))
    side_at = ptx.at(warp, 32, ptx.at(ptx.right(lane, 3), 4, ptx.base))
    for first in range(0, rounds, 8):
        values = [_values(ptx, words, bf16=bf16) for words in loaded[first : first + 8]]
        inverses = _inverses(ptx, plan, [warp, side_at], values, first, n_warps)
        for unit, (v, inverse) in enumerate(zip(values, inverses, strict=True), first):
            code, sums = _rounded(ptx, v, inverse)
            offset = unit * n_warps
            ptx.store(code_at, plan.codes + offset * 16, code, guards[unit])
            # The eight lanes of a group write the same.
            ptx.store(side_at, plan.sides + offset * 32 + 16, sums, guards[unit])
    return ptx.done()


def _values(ptx: WarpPtx, words: list[str], *, bf16: bool) -> list[str]:
    if bf16:
        words = [v for w in words for v in (ptx.left(w, 16), ptx.both(w, 0xFFFF0000))]
    return [ptx.do("mov.b32", word, to=ptx.fresh("f")) for word in words]


def _inverses(
    ptx: WarpPtx, plan: BulkPlan, at: list[str], values: list[list[str]], first: int, n_warps: int
) -> list[str]:
    """Store the scales of up to eight units and return what their values are multiplied by.

    Of the eight lanes of a group each divides for a unit of its own.
    """
    eighth, own = ptx.do("and.b32", "$1", 7), ""
    for unit, v in enumerate(values):
        most = [ptx.do("abs.f32", one) for one in v]
        largest = ptx.do("max.f32", ptx.do("max.f32", *most[:2]), ptx.do("max.f32", *most[2:]))
        for distance in (1, 2, 4):
            largest = ptx.do("max.f32", largest, ptx.other(largest, distance))
        here = ptx.flag("eq.u32", eighth, unit)
        own = ptx.do("selp.f32", largest, own, here) if own else largest
    tiny = ptx.flag("lt.f32", own, "0f0D800000")  # below 2^-100, `reference.SMALLEST`
    scale = ptx.do("div.rn.f32", ptx.do("selp.f32", "0f00000000", own, tiny), "0f42FE0000")
    inverse = ptx.do("div.rn.f32", "0f42FE0000", ptx.do("selp.f32", "0f3F800000", own, tiny))
    inverse = ptx.do("selp.f32", "0f00000000", inverse, tiny)
    number = ptx.do("add.u32", ptx.at(eighth, n_warps, at[0]), first * n_warps)
    inside = ptx.flag("lt.u32", number, plan.units)
    offset = plan.sides + first * n_warps * 32
    ptx.store(ptx.at(eighth, n_warps * 32, at[1]), offset, scale, f"@{inside}")
    group = ptx.do("and.b32", "$1", 24)
    return [ptx.from_lane(inverse, ptx.do("or.b32", group, u)) for u in range(len(values))]


def _rounded(ptx: WarpPtx, v: list[str], inverse: str) -> tuple[str, str]:
    """A lane's four codes, and the two sums of the group of its eight lanes."""
    scaled = [ptx.do("mul.rn.f32", one, inverse) for one in v]
    c = [ptx.do("cvt.rni.s32.f32", one, to=ptx.fresh("r")) for one in scaled]
    low, high = (ptx.do("prmt.b32", *c[i : i + 2], "0x0040") for i in (0, 2))
    code = ptx.do("prmt.b32", low, high, "0x5410")
    total = ptx.do("dp4a.s32.s32", code, "0x01010101", 0)
    for distance in (1, 2):
        total = ptx.do("add.s32", total, ptx.other(total, distance))
    other, upper = ptx.other(total, 4), ptx.flag("ne.u32", ptx.do("and.b32", "$1", 4), 0)
    first, second = (ptx.do("selp.b32", *pair, upper) for pair in ((other, total), (total, other)))
    return code, ptx.do("prmt.b32", first, second, "0x5410")


def load_row_asm(plan: BulkPlan, n_warps: int) -> str:
    """Return PTX that loads a q8_1 row, $2 its codes and $3 its sides.

    A bulk copy of it would stand in one queue behind those of other programs' rows.
    """
    ptx, n = WarpPtx(), 10 * plan.units  # of 16 bytes
    rounds, moves = -(-n // (32 * n_warps)), []
    for step in range(rounds):
        vector = ptx.do("add.u32", "$1", 32 * n_warps * step)
        guard = f"@{ptx.flag('lt.u32', vector, n)}" if step + 1 == rounds else ""
        is_code = ptx.flag("lt.u32", vector, 8 * plan.units)
        code, side = ptx.wide_at(vector, 16, "$2"), ptx.wide_at(vector, 16, "$3")
        side = ptx.wide_at(-128 * plan.units, 1, side)
        source, words = ptx.fresh("l"), [ptx.fresh("r") for _ in range(4)]
        ptx.text.append(f"selp.b64 {source}, {code}, {side}, {is_code};")
        ptx.text.append(f"{guard} ld.global.v4.b32 {{{', '.join(words)}}}, [{source}];")
        row = ptx.do("min.u32", ptx.do("div.u32", vector, plan.units), 8)
        at = ptx.at(row, plan.stride - 16 * plan.units, ptx.at(vector, 16, ptx.base))
        moves.append(f"{guard} st.shared.v4.b32 [{at}+{plan.codes}], {{{', '.join(words)}}};")
    ptx.text += moves
    return ptx.done()
