"""A router's logits for a few rows, a thread a chain, for NVIDIA GPUs.

A program takes a few rows of the matrix. All of its threads make products of these and the token's
row, in shared memory; then its first threads add up a row of products each, which takes as long as
the additions wait for each other. The matrix is asked for before the kernel ahead is joined.

Invariants: products are rounded (mul.rn) and added in their order (add.rn): the bits are those of
the plain body. All of shared memory is addressed by the PTX, but for its last slice.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .early_launch import early
from .shared_slices import reserve
from .warp_ptx import WarpPtx

ROWS = 3  # of the matrix, a program: 384 rows are 128 programs, one for each multiprocessor
WARPS = 8
TURN = 64  # channels that one turn of the loop adds
_REGISTERS = 128
_WORDS_AHEAD = 64  # of the matrix that a thread has on their way
_SLICE = 256
_SHARED_BYTES = 99 << 10  # of a program, on every GPU that speaks PTX


class RowPlan(NamedTuple):
    """What a program does, and where its products lie."""

    k: int
    bf16: bool  # the matrix, else it is f32
    rows: int
    warps: int
    turn: int

    @property
    def padded(self) -> int:
        """Channels that are added; those beyond the last are +0."""
        return -(-self.k // self.turn) * self.turn

    @property
    def stride(self) -> int:
        """Bytes from one row of products to the next: rows begin in different banks."""
        return 4 * self.padded + 16

    @property
    def slices(self) -> int:
        """Slices of shared memory; the last one is the compiler's."""
        # The loop loads half a turn behind the last product.
        return -(-(self.rows * self.stride + 2 * self.turn) // _SLICE) + 1

    @property
    def rounds(self) -> int:
        """How often all threads together take four channels each."""
        return -(-self.padded // (128 * self.warps))

    def guard(self, ptx: WarpPtx, round_: int, end: int) -> str:
        """A guard for threads whose channels of a round lie before the end."""
        first, threads = round_ * 32 * self.warps, 32 * self.warps
        if 4 * (first + threads) <= end:
            return ""
        return f"@{ptx.flag('lt.s32', '$1', max(0, end // 4 - first))}"


@gluon.jit
def _router_rows_kernel(
    x, weight, out, n, stride,
    K: gl.constexpr, ROWS: gl.constexpr, SLICES: gl.constexpr, CHAINS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    reserve(SLICES, WARPS)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    thread = gl.arange(0, 32 * WARPS, layout=line)
    first = gl.program_id(0) * ROWS
    x_at = (x + gl.program_id(1).to(gl.int64) * stride).to(gl.int64, bitcast=True)
    weight_at = (weight + first.to(gl.int64) * K).to(gl.int64, bitcast=True)
    last = gl.minimum(n - 1 - first, ROWS - 1)
    logit = gl.inline_asm_elementwise(
        CHAINS, "=f,r,l,l,r",
        [thread, x_at + thread * 0, weight_at + thread * 0, last + thread * 0],
        dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip
    gl.store(out + gl.program_id(1) * n + first + thread, logit, mask=thread <= last)


def fits(weight: Tensor) -> bool:
    """Whether the kernel takes a matrix [E, H]: four channels are loaded at once."""
    aligned = weight.shape[1] % 4 == 0 and weight.storage_offset() % 4 == 0
    return aligned and _plan(weight).slices * _SLICE <= _SHARED_BYTES


def launch_layouts(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Fill out [M, n] f32 with x [M, k] times weight [n, k], bf16 or f32."""
    x = x.float()
    if x.storage_offset() % 4 or x.stride(0) % 4:
        x = x.clone(memory_format=torch.contiguous_format)  # lanes load 16 bytes
    n, plan, options = weight.shape[0], _plan(weight), early(x.device)
    joins = options.pop("EARLY")  # within the PTX, once the matrix is asked for
    _router_rows_kernel[(-(-n // plan.rows), x.shape[0])](
        x, weight, out, n, x.stride(0), **constants(plan, joins=joins),
        num_warps=plan.warps, maxnreg=_REGISTERS, **options,
    )  # fmt: skip


def _plan(weight: Tensor) -> RowPlan:
    return RowPlan(weight.shape[1], weight.dtype == torch.bfloat16, ROWS, WARPS, TURN)


@lru_cache(maxsize=16)
def constants(plan: RowPlan, *, joins: bool) -> dict[str, Any]:
    """Return what the kernel is compiled for."""
    return {
        "K": plan.k,
        "ROWS": plan.rows,
        "SLICES": plan.slices,
        "CHAINS": chains(plan, joins=joins),
        "WARPS": plan.warps,
    }


def chains(plan: RowPlan, *, joins: bool) -> str:
    """Return PTX that leaves a row's sum in $0 of its thread.

    $1 the thread, $2 and $3 the addresses of the token's row and the first row of the matrix,
    $4 the last of the program's rows: those behind it are not there, and it stands in for them.
    """
    ptx = WarpPtx()
    size = words = 2 if plan.bf16 else 4  # bytes of a value, or words of four channels
    begin = ptx.wide_at("$1", 4 * size, "$3")
    matrix = [
        ptx.wide_at(ptx.do("min.s32", "$4", row), plan.k * size, begin) for row in range(plan.rows)
    ]
    token, to = ptx.wide_at("$1", 16, "$2"), ptx.at("$1", 16, ptx.base)
    at_once = max(1, _WORDS_AHEAD // (plan.rows * words))
    for first in range(0, plan.rounds, at_once):
        rounds = range(first, min(first + at_once, plan.rounds))
        weights = [
            [_load(ptx, plan, number, row, words, ".nc") for row in matrix] for number in rounds
        ]
        if joins and first == 0:
            ptx.text += ["griddepcontrol.wait;", "griddepcontrol.launch_dependents;"]
        values = [_load(ptx, plan, number, token, 4) for number in rounds]
        for number, value, rows in zip(rounds, values, weights, strict=True):
            guard = plan.guard(ptx, number, plan.padded)
            for row, loaded in enumerate(rows):
                offset = row * plan.stride + number * plan.warps * 512
                _multiply(ptx, value, loaded, f"{guard} st.shared.v4.b32 [{to}+{offset}]")
    ptx.text.append("bar.sync 0;")
    _add_up(ptx, plan)
    return ptx.done(result=True)


def _load(
    ptx: WarpPtx, plan: RowPlan, number: int, at: str, words: int, kind: str = ""
) -> list[str]:
    """A thread's four channels of a round, 0 beyond the last."""
    guard, loaded = plan.guard(ptx, number, plan.k), [ptx.fresh("r") for _ in range(words)]
    if guard:
        ptx.text += [f"mov.b32 {word}, 0;" for word in loaded]
    offset = number * plan.warps * 128 * words
    names = ", ".join(loaded)
    ptx.text.append(f"{guard} ld.global{kind}.v{words}.b32 {{{names}}}, [{at}+{offset}];")
    return loaded


def _multiply(ptx: WarpPtx, value: list[str], loaded: list[str], store: str) -> None:
    """Store the products of a thread's four channels."""
    if len(loaded) == 2:  # bf16
        pairs = [(ptx.left(word, 16), ptx.both(word, 0xFFFF0000)) for word in loaded]
        loaded = [half for pair in pairs for half in pair]
    products = [ptx.do("mul.rn.f32", *pair) for pair in zip(value, loaded, strict=True)]
    ptx.text.append(f"{store}, {{{', '.join(products)}}};")


def _add_up(ptx: WarpPtx, plan: RowPlan) -> None:
    """Leave in $0 of the first threads the sum of a row of products each."""
    half = plan.turn // 2
    end, turn = ptx.label(), ptx.label()
    ptx.text.append("mov.b32 $0, 0;")
    ptx.text.append(f"@{ptx.flag('ge.u32', '$1', 32)} bra {end};")
    row = ptx.do("min.u32", "$1", plan.rows - 1)
    at = ptx.at(row, plan.stride, ptx.base)
    until = ptx.do("add.u32", at, 4 * plan.padded)
    total = ptx.do("mov.f32", "0f00000000")
    near, far = ([ptx.fresh("f") for _ in range(half)] for _ in range(2))
    _products(ptx, near, at, 0)
    ptx.text.append(f"{turn}:")
    # What is added next is asked for before what is there is added.
    for loaded, offset, added in ((far, 4 * half, near), (near, 8 * half, far)):
        _products(ptx, loaded, at, offset)
        for value in added:
            ptx.do("add.rn.f32", total, value, to=total)
    ptx.do("add.u32", at, 4 * plan.turn, to=at)
    ptx.text.append(f"@{ptx.flag('lt.u32', at, until)} bra {turn};")
    ptx.text.append(f"mov.b32 $0, {total};")
    ptx.text.append(f"{end}:")


def _products(ptx: WarpPtx, to: list[str], at: str, offset: int) -> None:
    for first in range(0, len(to), 4):
        names = ", ".join(to[first : first + 4])
        ptx.text.append(f"ld.shared.v4.f32 {{{names}}}, [{at}+{offset + 4 * first}];")
