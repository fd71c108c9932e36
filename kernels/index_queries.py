"""The indexer's queries, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bf16_bits import round_to_bf16
from .device import runs_kernels
from .fp4_groups import round_groups_to_fp4_index
from .reference import index_queries as reference
from .tensor_checks import check_contiguous, check_rows, check_tensor
from .turn_tail import turn_tail

_HEADS_A_PROGRAM = 4


@triton.jit
def _index_queries_kernel(
    projected,
    first,
    turns,
    out,
    n_heads,
    width,
    n_turned,
    stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BF16: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    token = tl.program_id(1)
    head = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    inside = (head < n_heads) & (at < width)
    position = tl.load(first) + token
    source = projected + token.to(tl.int64) * stride + head * width + at
    row = tl.load(source, mask=inside, other=0.0)
    if BF16:
        row = round_to_bf16(row)
    row = turn_tail(row, turns + position * n_turned, width, n_turned, ROWS, BLOCK)
    if BF16:
        row = round_to_bf16(row)
    if ROUNDS:
        row = round_groups_to_fp4_index(tl.reshape(row, [ROWS, BLOCK // 32, 32]))
    row = tl.reshape(row, [ROWS, BLOCK])
    tl.store(out + (token.to(tl.int64) * n_heads + head) * width + at, row, mask=inside)


def index_queries(
    projected: Tensor,
    first: Tensor,
    turns: Tensor,
    *,
    dim: int,
    dtype: torch.dtype,
    rounds: bool,
    out: Tensor | None = None,
) -> Tensor:
    """Turn the query heads of each token at its position and round them.

    projected  [T, heads * dim] f32, rows contiguous; cast to `dtype` first
    first      [1] i64, the position of row 0
    turns      [P, r / 2, 2] f32, P > the last position
    rounds     whether queries are rounded to fp4
    returns    [T, heads, dim] f32, exact in `dtype`, in `out` where given

    Raises ValueError on a shape or dtype that differs. Bits equal `reference.index_queries`.
    Source: model specification, sections 3.5 and 2.2.
    """
    n_tokens, n_heads = len(projected), projected.shape[1] // dim
    if projected.dtype != torch.float32 or projected.shape[1] % dim or dim % 32:
        raise ValueError(
            f"index_queries: projected is {projected.dtype} {tuple(projected.shape)}, "
            f"wanted f32 heads of {dim}"
        )
    check_rows("index_queries", projected=projected)
    check_contiguous("index_queries", turns=turns)
    shape = (n_tokens, n_heads, dim)
    if out is None:
        out = torch.empty(shape, dtype=torch.float32, device=projected.device)
    check_tensor("index_queries", "out", out, shape, torch.float32)
    if not runs_kernels(projected):
        found = reference.index_queries(
            projected, first, turns, dim=dim, dtype=dtype, rounds=rounds
        )
        return out.copy_(found)
    if n_tokens:
        grid = (triton.cdiv(n_heads, _HEADS_A_PROGRAM), n_tokens)
        _index_queries_kernel[grid](
            projected, first, turns, out, n_heads, dim, 2 * turns.shape[1], projected.stride(0),
            ROWS=_HEADS_A_PROGRAM, BLOCK=triton.next_power_of_2(dim),
            BF16=dtype == torch.bfloat16, ROUNDS=rounds, num_warps=2, enable_fp_fusion=False,
        )  # fmt: skip
    return out
