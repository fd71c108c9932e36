"""The best-scored compressed rows of each token, chosen on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import runs_kernels
from .reference import select_rows as reference
from .tensor_checks import check_rows, check_tensor
from .top_keys import (
    ABSENT,
    LOWEST,
    Narrowing,
    leave_best,
    load_left,
    n_left,
    narrow_kernel,
    order_keys,
    take_best,
    visible_rows,
)


@triton.jit
def _load_scores(
    scores, blocks, token, part, n_here, stride, n_blocks,
    SIZE: tl.constexpr, SLICE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, SLICE)
    inside = at < n_here
    row = part * SLICE + at
    keys = order_keys(
        tl.load(scores + token.to(tl.int64) * stride + row, mask=inside, other=0.0), BITS
    )
    if SIZE > 0:
        kept = tl.load(blocks + token.to(tl.int64) * n_blocks + row // SIZE, mask=inside, other=1)
        keys = tl.where(kept != 0, keys, LOWEST >> (32 - BITS))
    return tl.where(inside, keys, ABSENT), row


@triton.jit
def _select_rows_kernel(
    scores,
    first,
    blocks,
    keys,
    ids,
    out_keys,
    out_ids,
    n_rows,
    ratio,
    stride,
    n_blocks,
    width,
    out_width,
    LEVEL: tl.constexpr,
    FINAL: tl.constexpr,
    SIZE: tl.constexpr,
    TOP: tl.constexpr,
    SLICE: tl.constexpr,
    BITS: tl.constexpr,
):
    part, token = tl.program_id(0), tl.program_id(1)
    visible = visible_rows(first, token, ratio, n_rows)
    n_here = tl.minimum(n_left(visible, LEVEL, SLICE, TOP) - part * SLICE, SLICE)
    if (visible > TOP) & (n_here > 0):
        if LEVEL == 0:
            key, row = _load_scores(
                scores, blocks, token, part, n_here, stride, n_blocks, SIZE, SLICE, BITS
            )
        else:
            key, row = load_left(keys, ids, token, part, width, n_here, SLICE)
        chosen, place = take_best(key, n_here, tl.minimum(n_here, TOP), BITS)
        if FINAL:
            tl.store(out_ids + token.to(tl.int64) * TOP + place, row, mask=chosen)
        else:
            leave_best(chosen, place, key, row, out_keys, out_ids, token, part, out_width, TOP)
    elif FINAL:
        at = tl.arange(0, SLICE)
        row = tl.where(at < visible, at, -1)
        tl.store(out_ids + token.to(tl.int64) * TOP + at, row, mask=at < TOP)


def select_rows(
    scores: Tensor,
    first: Tensor,
    ratio: int,
    top_k: int,
    *,
    blocks: Tensor | None = None,
    block_size: int = 0,
    dtype: torch.dtype = torch.float32,
    selection: Tensor | None = None,
) -> Tensor:
    """Take the `top_k` best rows: higher score first, then the lower index; NaN ranks last.

    scores      [T, G] f32, rows contiguous; rows that a token does not see are not read, and none
                where it sees no more than top_k
    first       [1] i64, the position of token 0; token t sees rows below (first + t + 1) // ratio
    blocks      [T, ceil(G / block_size)] u8, 0 where a block of rows scores -inf
    dtype       the scores are exact in it: bf16 halves the search
    returns     [T, top_k] i32, ascending, -1 at the end, in `selection` where given

    Raises ValueError on a shape or dtype that differs. Equals `reference.select_rows`.
    Source: model specification, section 3.5, Selection.
    """
    n_tokens, n_rows = scores.shape
    if selection is None:
        selection = torch.empty((n_tokens, top_k), dtype=torch.int32, device=scores.device)
    check_tensor("select_rows", "selection", selection, (n_tokens, top_k), torch.int32)
    if scores.dtype != torch.float32:
        raise ValueError(f"select_rows: scores are {scores.dtype}, wanted f32")
    check_rows("select_rows", scores=scores)
    if blocks is not None:
        wanted = (n_tokens, -(-n_rows // block_size) if block_size else 0)
        if tuple(blocks.shape) != wanted or blocks.dtype != torch.uint8:
            raise ValueError(f"select_rows: blocks are {tuple(blocks.shape)}, wanted u8 {wanted}")
    plan = Narrowing.plan(n_rows, top_k)
    if not runs_kernels(scores):
        return selection.copy_(_on_host(scores, first, ratio, top_k, blocks, block_size))
    if n_tokens:
        _launch(scores, first, ratio, blocks, block_size, dtype, selection, plan)
    return selection


def _launch(
    scores: Tensor,
    first: Tensor,
    ratio: int,
    blocks: Tensor | None,
    block_size: int,
    dtype: torch.dtype,
    selection: Tensor,
    plan: Narrowing,
) -> None:
    n_tokens, last = len(scores), len(plan.widths) - 1
    bits = 16 if dtype == torch.bfloat16 else 32
    left = selection.expand(2, -1, -1)
    for level, width in enumerate(plan.widths):
        final = level == last
        grid = (1 if final else plan.parts(level), n_tokens)
        out = left if final else plan.left(level, n_tokens, scores.device)
        into = (left[0], left[1], out[0], selection if final else out[1], plan.n, ratio)
        if 0 < level < last:
            narrow_kernel[grid](
                first, *into, width, plan.widths[level + 1], LEVEL=level, SIZE=1, TOP=plan.top,
                SLICE=plan.slice, BITS=bits, num_warps=plan.n_warps,
            )  # fmt: skip
        else:
            _select_rows_kernel[grid](
                scores, first, scores if blocks is None else blocks.contiguous(), *into,
                scores.stride(0), 0 if blocks is None else blocks.shape[1], width, out.shape[2],
                LEVEL=level, FINAL=final, SIZE=0 if blocks is None else block_size, TOP=plan.top,
                SLICE=plan.slice, BITS=bits, num_warps=plan.n_warps,
            )  # fmt: skip
        left = out


def _on_host(
    scores: Tensor, first: Tensor, ratio: int, top_k: int, blocks: Tensor | None, block_size: int
) -> Tensor:
    n_tokens, n_rows = scores.shape
    tokens = torch.arange(1, n_tokens + 1, device=scores.device)
    visible = ((first + tokens) // ratio).clamp(max=n_rows)
    if blocks is not None:
        kept = blocks.bool().repeat_interleave(block_size, dim=1)[:, :n_rows]
        scores = scores.masked_fill(~kept, -torch.inf)
    chosen = reference.select_rows(scores, visible, top_k)
    return torch.nn.functional.pad(chosen, (0, top_k - chosen.shape[1]), value=-1)
