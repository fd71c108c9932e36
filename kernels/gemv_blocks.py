"""A few rows times one dense matrix of GGUF blocks, as the file has them.

Invariants: rows are rounded to q8_1 first; whole numbers are exact; a row's bits depend on nothing
else in the call. Weights are not laid out anew: the layouts load neighbouring words with
neighbouring lanes whatever a block's alignment, so expert slots and dense matrices share one form.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .block_words import UNITS
from .device import runs_kernels, speaks_ptx
from .formats import FORMATS
from .plain_blocks import plain_block_rows
from .q8_1_rows import Rows, q8_1_rows
from .reference import gemv_blocks as reference
from .tensor_checks import check_contiguous, check_tensor

MAX_ROWS = 8


@triton.jit
def _gemv_blocks_kernel(
    codes, sides, weight, out, n, rows_a_group, groups,
    FORMAT: tl.constexpr, BYTES: tl.constexpr, ROW_BYTES: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0)
    group = tl.program_id(1)
    inside = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    row = group * rows_a_group + inside
    units: tl.constexpr = (K + 127) // 128
    x_row = m * groups + group
    y = plain_block_rows(
        weight, codes + x_row * units * 128, sides + x_row * units * 8, row, inside < rows_a_group,
        FORMAT, BYTES, ROW_BYTES, K,
    )  # fmt: skip
    tl.store(out + m * n + row, y, mask=inside < rows_a_group)


def gemv_blocks(
    x: Tensor,
    weight: Tensor,
    name: str,
    *,
    groups: int = 1,
    plain: bool = False,
    rows: Rows | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply a few rows, rounded to q8_1, with a matrix as it is stored: x . weight^T.

    x        [M, groups * k] f32, M at most 8, contiguous
    weight   [n, bytes of k values] u8: rows of blocks of the format `name`; on a GPU it begins at a
             multiple of 16 bytes, and its last four bytes may be followed by none
    groups   rows g * n / groups .. of the matrix take the g-th k channels of x
    plain    takes the body without explicit layouts on a GPU too, for comparison
    rows     scratch for M * groups rows of k values, as `q8_1_rows.empty_rows` makes it
    returns  [M, n] f32, in `out` where given; with both given nothing is allocated

    Raises ValueError on a shape, dtype or format that differs. Within 2e-6 (relative to the row's
    norm) of `reference.gemv_blocks`. Source: ggml block layouts.
    """
    n, k = _check(x, weight, name, groups)
    if out is None:
        out = torch.empty((x.shape[0], n), dtype=torch.float32, device=x.device)
    check_tensor("gemv_blocks", "out", out, (x.shape[0], n), torch.float32)
    for part in rows or ():
        check_contiguous("gemv_blocks", rows=part)
    if not runs_kernels(x):
        return out.copy_(reference.gemv_blocks(x, weight, name, groups))
    if x.shape[0] == 0:
        return out
    codes, sides = q8_1_rows(x.view(-1, k), out=rows)
    if speaks_ptx(x.device) and not plain:
        from .gemv_blocks_layouts import launch_layouts, tiles  # noqa: PLC0415  wants a GPU

        if tiles(n, n // groups, k, name):
            launch_layouts(codes, sides, weight, name, out, groups)
            return out
    _gemv_blocks_kernel[(x.shape[0], groups, triton.cdiv(n // groups, 8))](
        codes, sides, weight, out, n, n // groups, groups,
        FORMAT=name, BYTES=UNITS[name].block_bytes, ROW_BYTES=weight.shape[1], K=k, ROWS=8,
    )  # fmt: skip
    return out


def _check(x: Tensor, weight: Tensor, name: str, groups: int) -> tuple[int, int]:
    if name not in UNITS:
        raise ValueError(f"gemv_blocks: format {name}, wanted one of {', '.join(UNITS)}")
    if weight.dtype != torch.uint8 or weight.dim() != 2:
        raise ValueError(f"gemv_blocks: weight is {weight.dtype} {tuple(weight.shape)}, wanted u8")
    block = FORMATS[name]
    n, row_bytes = weight.shape
    k = row_bytes // block.BLOCK_BYTES * block.BLOCK_VALUES
    if row_bytes % block.BLOCK_BYTES or n % groups:
        raise ValueError(f"gemv_blocks: {n} rows of {row_bytes} bytes, {groups} groups of {name}")
    if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != groups * k:
        raise ValueError(f"gemv_blocks: x is {x.dtype} {tuple(x.shape)}, wanted [M, {groups * k}]")
    if x.shape[0] > MAX_ROWS:
        raise ValueError(f"gemv_blocks: {x.shape[0]} rows, at most {MAX_ROWS}")
    check_contiguous("gemv_blocks", x=x, weight=weight)
    return n, k
