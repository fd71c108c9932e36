"""The candidate blocks that later index sources may select from, chosen on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import runs_kernels
from .reference import select_blocks as reference
from .tensor_checks import check_rows, check_tensor
from .top_keys import (
    ABSENT,
    INFINITE,
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
def _load_blocks(
    scores, token, part, n_here, visible, stride,
    SIZE: tl.constexpr, SLICE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, SLICE)
    block = part * SLICE + at
    scores += token.to(tl.int64) * stride
    keys = tl.full([SLICE], LOWEST >> (32 - BITS), tl.int32)
    for i in tl.static_range(SIZE):
        row = block * SIZE + i
        seen = row < visible
        key = order_keys(tl.load(scores + row, mask=seen, other=-float("inf")), BITS)
        keys = tl.maximum(keys, key)
    keys = tl.where(block == (visible - 1) // SIZE, INFINITE >> (32 - BITS), keys)
    return tl.where(at < n_here, keys, ABSENT), block


@triton.jit
def _select_blocks_kernel(
    scores,
    first,
    keys,
    ids,
    out_keys,
    out_ids,
    kept,
    n_rows,
    ratio,
    stride,
    width,
    out_width,
    n_blocks,
    LEVEL: tl.constexpr,
    FINAL: tl.constexpr,
    SIZE: tl.constexpr,
    TOP: tl.constexpr,
    SLICE: tl.constexpr,
    BITS: tl.constexpr,
):
    part, token = tl.program_id(0), tl.program_id(1)
    visible = visible_rows(first, token, ratio, n_rows)
    n = tl.cdiv(visible, SIZE)
    n_here = tl.minimum(n_left(n, LEVEL, SLICE, TOP) - part * SLICE, SLICE)
    kept += token.to(tl.int64) * n_blocks
    if LEVEL == 0:
        # Where all visible blocks are kept this is all; else the chosen ones are set after it.
        block = part * SLICE + tl.arange(0, SLICE)
        inside = block < tl.where(n > TOP, 0, n)
        tl.store(kept + block, inside.to(tl.uint8), mask=block < n_blocks)
    if (n > TOP) & (n_here > 0):
        if LEVEL == 0:
            key, block = _load_blocks(
                scores, token, part, n_here, visible, stride, SIZE, SLICE, BITS
            )
        else:
            key, block = load_left(keys, ids, token, part, width, n_here, SLICE)
        chosen, place = take_best(key, n_here, tl.minimum(n_here, TOP), BITS)
        if FINAL:
            tl.debug_barrier()  # one slice: the zeros above were written
            chosen = chosen & (key > (LOWEST >> (32 - BITS)))
            tl.store(kept + block, chosen.to(tl.uint8), mask=chosen)
        else:
            leave_best(chosen, place, key, block, out_keys, out_ids, token, part, out_width, TOP)


def select_blocks(
    scores: Tensor,
    first: Tensor,
    ratio: int,
    block_size: int,
    top_blocks: int,
    *,
    dtype: torch.dtype = torch.float32,
    kept: Tensor | None = None,
) -> Tensor:
    """Keep the best blocks of rows of each token, its newest visible one always.

    scores   [T, G] f32, rows contiguous; rows that a token does not see are not read, and none
             where it sees no more than top_blocks blocks: it keeps them all
    first    [1] i64, the position of token 0; token t sees rows below (first + t + 1) // ratio
    dtype    the scores are exact in it: bf16 halves the search
    returns  [T, ceil(G / block_size)] u8, 1 for a kept block, in `kept` where given

    Raises ValueError on a shape or dtype that differs. Equals `reference.select_blocks` where more
    than top_blocks blocks are visible. Source: model specification, section 3.6.
    """
    n_tokens, n_rows = scores.shape
    shape = (n_tokens, -(-n_rows // block_size))
    if kept is None:
        kept = torch.empty(shape, dtype=torch.uint8, device=scores.device)
    check_tensor("select_blocks", "kept", kept, shape, torch.uint8)
    if scores.dtype != torch.float32:
        raise ValueError(f"select_blocks: scores are {scores.dtype}, wanted f32")
    check_rows("select_blocks", scores=scores)
    plan = Narrowing.plan(shape[1], top_blocks)
    if not runs_kernels(scores):
        return kept.copy_(_on_host(scores, first, ratio, block_size, top_blocks))
    if n_tokens:
        _launch(scores, first, ratio, block_size, dtype, kept, plan)
    return kept


def _launch(
    scores: Tensor,
    first: Tensor,
    ratio: int,
    block_size: int,
    dtype: torch.dtype,
    kept: Tensor,
    plan: Narrowing,
) -> None:
    n_tokens, last = len(scores), len(plan.widths) - 1
    bits = 16 if dtype == torch.bfloat16 else 32
    left = kept.expand(2, -1, -1)  # no one's where nothing was left yet
    for level, width in enumerate(plan.widths):
        final = level == last
        grid = (1 if final else plan.parts(level), n_tokens)
        out = left if final else plan.left(level, n_tokens, scores.device)
        into = (left[0], left[1], out[0], out[1])
        if 0 < level < last:
            narrow_kernel[grid](
                first, *into, scores.shape[1], ratio, width, plan.widths[level + 1], LEVEL=level,
                SIZE=block_size, TOP=plan.top, SLICE=plan.slice, BITS=bits, num_warps=plan.n_warps,
            )  # fmt: skip
        else:
            _select_blocks_kernel[grid](
                scores, first, *into, kept, scores.shape[1], ratio, scores.stride(0), width,
                out.shape[2], plan.n, LEVEL=level, FINAL=final, SIZE=block_size, TOP=plan.top,
                SLICE=plan.slice, BITS=bits, num_warps=plan.n_warps,
            )  # fmt: skip
        left = out


def _on_host(scores: Tensor, first: Tensor, ratio: int, block_size: int, top_blocks: int) -> Tensor:
    n_tokens, n_rows = scores.shape
    tokens = torch.arange(1, n_tokens + 1, device=scores.device)
    visible = ((first + tokens) // ratio).clamp(max=n_rows)
    kept = reference.select_blocks(scores, visible, block_size, top_blocks)
    n_visible = (visible.unsqueeze(1) + block_size - 1) // block_size
    seen = torch.arange(kept.shape[1], device=scores.device) < n_visible
    return torch.where(n_visible <= top_blocks, seen, kept)
