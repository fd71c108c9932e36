"""The smallest launches that reach the kernels of matrices and experts, their masks and edges."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, cat

from kernels.block_words import UNITS
from kernels.formats.fp4_expert import Fp4Shape
from kernels.formats.k_expert import BlockShape
from kernels.gemm_blocks import gemm_blocks
from kernels.gemv import gemv
from kernels.gemv_blocks import gemv_blocks
from kernels.routed_m1 import routed_m1
from kernels.routed_m1_blocks import row_bytes
from kernels.routed_rows import routed_rows
from tests.support.stop_tensors import (
    BF16,
    F32,
    LIMIT,
    Stops,
    codes,
    i32,
    i64,
    into,
    numbers,
    scale_codes,
    strided,
)  # fmt: skip

EXPERTS = (("Q2_K", "Q2_K", "Q3_K"), ("Q4_K",) * 3, ("Q8_0",) * 3, ("Q6_K", "Q4_K", "Q6_K"))

STOPS: Stops = {}


def addresses_of(pieces: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the pointers [3, K] of K experts' three pieces; no pieces: it is absent."""
    columns = [[piece.data_ptr() for piece in three] or [0, 0, 0] for three in pieces]
    return i64([list(row) for row in zip(*columns, strict=True)])


def fp4_experts(hidden: int, width: int, n: int) -> tuple[Fp4Shape, list[list[Tensor]]]:
    """Return a shape and n experts, each piece an allocation; the second expert is absent."""
    n_codes = hidden * width // 2
    n_scales = n_codes // 16
    experts = [[cat([codes(n_codes), scale_codes(n_scales)]) for _ in range(3)] for _ in range(n)]
    experts[1] = []
    return Fp4Shape(hidden, width, n_codes, n_codes, n_codes), experts


@into(STOPS, "gemv._gemv_kernel")
def _matrices() -> None:
    for rows in (1, 8):
        for n, k, groups in ((45, 100, 1), (45, 45, 3)):
            scales = scale_codes(-(-n // 32), -(-k // 32))
            gemv(strided(rows, groups * k), codes(n, k), scales, groups=groups, plain=True)
            weight = numbers(n, k, dtype=BF16)
            gemv(strided(rows, groups * k), weight, groups=groups, plain=True)


@into(STOPS, "gemv_layouts._gemv_kernel")
def _matrices_in_layouts() -> None:
    for rows in (1, 8):
        for n, k, groups in ((48, 96, 1), (10, 1024, 2)):
            scales = scale_codes(-(-n // 32), k // 32)
            gemv(strided(rows, groups * k, 4), codes(n, k), scales, groups=groups)
            gemv(strided(rows, groups * k, 4), numbers(n, k, dtype=BF16), groups=groups)


@into(STOPS, "gemv_blocks._gemv_blocks_kernel")
def _matrices_of_blocks() -> None:
    for name in UNITS:
        gemv_blocks(
            numbers(3, 2 * 256), codes(26, row_bytes(name, 256)), name, groups=2, plain=True
        )
    gemv_blocks(numbers(1, 160), codes(5, row_bytes("Q8_0", 160)), "Q8_0", plain=True)


@into(STOPS, "gemv_blocks_layouts._gemv_blocks_kernel")
def _matrices_of_blocks_in_layouts() -> None:
    for name in UNITS:
        for rows, n, k in ((1, 48, 768), (3, 6, 2048)):
            gemv_blocks(numbers(rows, k), codes(n, row_bytes(name, k)), name)


@into(STOPS, "routed_m1._gate_up_kernel", "routed_m1._down_kernel")
def _one_tokens_experts() -> None:
    shape, experts = fp4_experts(160, 96, 3)
    routed_m1(numbers(1, 160), addresses_of(experts), numbers(3), shape, LIMIT, plain=True)


@into(STOPS, "routed_m1_layouts._gate_up_kernel", "routed_m1_layouts._down_kernel")
def _one_tokens_experts_in_layouts() -> None:
    for hidden, width in ((160, 96), (256, 64)):
        shape, experts = fp4_experts(hidden, width, 3)
        routed_m1(numbers(1, hidden), addresses_of(experts), numbers(3), shape, LIMIT)


def block_experts(shape: BlockShape, n: int) -> list[list[Tensor]]:
    """Return n experts, each piece an allocation; the second expert is absent."""
    up = shape.width * row_bytes(shape.up, shape.hidden)
    gate = shape.width * row_bytes(shape.gate, shape.hidden)
    down = shape.hidden * row_bytes(shape.down, shape.width)
    return [[] if at == 1 else [codes(gate), codes(up), codes(down)] for at in range(n)]


def _one_tokens_blocks(*, plain: bool) -> None:
    for names in EXPERTS:
        shape = BlockShape(256, 512, *names)
        experts = block_experts(shape, 3)
        routed_m1(numbers(1, 256), addresses_of(experts), numbers(3), shape, LIMIT, plain=plain)


@into(STOPS, "routed_m1_blocks._gate_up_kernel", "routed_m1_blocks._down_kernel")
def _one_tokens_experts_of_blocks() -> None:
    _one_tokens_blocks(plain=True)


@into(STOPS, "routed_m1_block_layouts._gate_up_kernel", "routed_m1_block_layouts._down_kernel")
def _one_tokens_experts_of_blocks_in_layouts() -> None:
    _one_tokens_blocks(plain=False)


@into(STOPS, "routed_m1_bulk._bulk_gate_up_kernel", "routed_m1_bulk._bulk_down_kernel")
def _one_tokens_experts_in_bulk() -> None:
    for width, dtype in ((768, F32), (2304, BF16)):
        shape = BlockShape(1024, width, *EXPERTS[0])
        experts = block_experts(shape, 3)
        routed_m1(numbers(1, 1024, dtype=dtype), addresses_of(experts), numbers(3), shape, LIMIT)


def _experts_of_rows(hidden: int, width: int, sizes: Sequence[int], *, plain: bool) -> None:
    shape, experts = fp4_experts(hidden, width, len(sizes))
    starts = [sum(sizes[:group]) for group in range(len(sizes) + 1)]
    tokens = i32([pair % 9 for pair in range(starts[-1])])
    routed_rows(
        numbers(9, hidden, dtype=BF16), tokens, numbers(starts[-1]), starts, addresses_of(experts),
        shape, LIMIT, plain=plain,
    )  # fmt: skip


@into(STOPS, "routed_rows._gate_up_kernel", "routed_rows._down_kernel")
def _experts() -> None:
    _experts_of_rows(160, 96, (1, 9, 0, 17), plain=True)


@into(
    STOPS,
    "routed_rows_layouts._rows_gate_up_kernel",
    "routed_rows_layouts._rows_down_kernel",
)
def _experts_in_layouts() -> None:
    _experts_of_rows(160, 96, (1, 9, 0, 17, 33, 70), plain=False)  # a tile of each size
    _experts_of_rows(256, 128, (9, 1, 20), plain=False)


@into(
    STOPS,
    "routed_rows_blocks._block_rows_gate_up_kernel",
    "routed_rows_blocks._block_rows_down_kernel",
)
def _experts_of_blocks() -> None:
    for names in EXPERTS:
        starts = [0, 1, 10, 30, 70] if names is EXPERTS[0] else [0, 1, 2, 11]  # tiles of each size
        shape = BlockShape(256, 512, *names)
        experts = block_experts(shape, len(starts) - 1)
        tokens = i32([pair % 9 for pair in range(starts[-1])])
        routed_rows(
            numbers(9, 256, dtype=BF16), tokens, numbers(starts[-1]), starts,
            addresses_of(experts), shape, LIMIT,
        )  # fmt: skip


@into(STOPS, "gemm_blocks._gemm_blocks_kernel")
def _many_rows_times_blocks() -> None:
    for name in UNITS:
        gemm_blocks(numbers(9, 256), codes(45, row_bytes(name, 256)), name)
    gemm_blocks(numbers(70, 256), codes(64, row_bytes("Q2_K", 256)), "Q2_K")
    gemm_blocks(numbers(9, 160), codes(5, row_bytes("Q8_0", 160)), "Q8_0")
