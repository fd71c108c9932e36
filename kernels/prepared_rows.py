"""Rows rounded to fp8 in the order and the form that `routed_rows` multiplies them in.

Invariants: a prepared row is a whole number of blocks of 128; within a block channel 32 q + 8 i + c
(a group's word i, its code c) stands at 16 c + 8 (i / 2) + 2 q + i % 2, what is beyond the row is
zero, and every value is 2^16 times what `round_fp8` gives: exact in bf16 up to 2^111.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bf16_bits import round_to_bf16
from .device import runs_kernels
from .reference import prepared_rows as reference
from .reference.prepared_rows import BLOCK
from .round_fp8 import round_groups_to_fp8
from .tensor_checks import check_contiguous, check_tensor

_BLOCKS_A_PROGRAM = 8


@triton.jit(do_not_specialize_on_alignment=["tokens"])
def _prepared_rows_kernel(
    x, tokens, out, width, n_blocks, BLOCKS: tl.constexpr, GATHERS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    source = row
    if GATHERS:
        source = tl.load(tokens + row).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    at = (block * 128)[:, None] + tl.arange(0, 128)[None, :]
    v = tl.load(x + source * width + at, mask=at < width, other=0.0).to(tl.float32)
    v = round_groups_to_fp8(tl.reshape(v, [BLOCKS, 4, 32])) * 65536.0
    v = tl.permute(tl.reshape(v, [BLOCKS, 4, 2, 2, 8]), (0, 4, 2, 1, 3))
    inside = (block < n_blocks)[:, None]
    # The interpreter truncates where a GPU rounds: values are exact either way but for overflows.
    v = round_to_bf16(tl.reshape(v, [BLOCKS, 128]))
    tl.store(out + row * n_blocks * 128 + at, v, mask=inside)


def prepared_rows(x: Tensor, tokens: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Round rows to fp8 and put them in the order that `routed_rows` reads.

    x        [T, k] bf16 or f32, contiguous, k a multiple of 32
    tokens   [R] i32, the rows of x to take, contiguous; None: each once
    returns  [R, ceil(k / 128) * 128] bf16, in `out` where given

    Raises ValueError on a shape or dtype that differs. Bits equal `reference.prepared_rows`.
    Source: model specification, section 2.2, ROUND_FP8.
    """
    if x.dim() != 2 or x.shape[1] % 32 or x.dtype not in {torch.bfloat16, torch.float32}:
        raise ValueError(f"prepared_rows: x is {x.dtype} {tuple(x.shape)}, wanted [T, 32 n] floats")
    if tokens is not None and tokens.dtype != torch.int32:
        raise ValueError(f"prepared_rows: tokens are {tokens.dtype}, wanted int32")
    check_contiguous("prepared_rows", x=x, tokens=tokens)
    n_rows, width = x.shape[0] if tokens is None else tokens.shape[0], x.shape[1]
    n_blocks = -(-width // BLOCK)
    shape = (n_rows, n_blocks * BLOCK)
    if out is None:
        out = torch.empty(shape, dtype=torch.bfloat16, device=x.device)
    check_tensor("prepared_rows", "out", out, shape, torch.bfloat16)
    if not runs_kernels(x):
        return out.copy_(reference.prepared_rows(x if tokens is None else x[tokens.long()]))
    if n_rows:
        # Rows are the first axis of the grid: it alone takes more than 65,535.
        grid = (n_rows, triton.cdiv(n_blocks, _BLOCKS_A_PROGRAM))
        _prepared_rows_kernel[grid](
            x, x if tokens is None else tokens, out, width, n_blocks,
            BLOCKS=_BLOCKS_A_PROGRAM, GATHERS=tokens is not None,
        )  # fmt: skip
    return out
