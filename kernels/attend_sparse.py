"""Attention over the window ring and the selected compressed rows, from raw queries.

Rows come in fixed blocks: the window from its oldest position on, then the selection in its order.
Each block gives a largest score, a sum and weighted rows; they are merged in ascending order.

Invariants: `splits` says which program computes a block, never how: each gives the same bytes, and
so do entries of -1 at the end of a selection, since a block of which nothing is seen is not merged.
A row's bits do not depend on how many rows a step has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attend_sparse_shapes import PLAIN_ROWS, TENSOR_ROWS, checked, n_blocks, scratch_parts
from .bf16_bits import round_to_bf16
from .device import interpreted, runs_kernels
from .early_launch import early, join_previous
from .reference import attend_sparse as reference
from .turn_pairs import turn_pairs

MAX_SPLITS = 16
_HEADS, _WARPS = 16, 4  # of a program
_LOG2_E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-1e30)  # below every score, and finite: it may be taken from itself


@triton.jit
def _queries(
    q, turns, head, start,
    N_HEADS: tl.constexpr, K: tl.constexpr, TURNED: tl.constexpr,
    COLUMNS: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """Return channels start .. of some heads' queries [HEADS, COLUMNS] f32, turned and rounded."""
    at = start + tl.arange(0, COLUMNS)
    inside = (head < N_HEADS)[:, None] & (at < K)[None, :]
    v = tl.load(q + head[:, None] * K + at[None, :], mask=inside, other=0.0).to(tl.float32)
    if BF16:
        v = round_to_bf16(v)
    v = turn_pairs(v, turns, start, K - TURNED, TURNED, False)
    if BF16:
        v = round_to_bf16(v)
    return v


@triton.jit
def _listed(
    position, selection, n_slots, block,
    WINDOW: tl.constexpr, SELECTED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return where the block's rows lie in ring or rows [ROWS] i32, and which of them are seen."""
    WINDOW_BLOCKS: tl.constexpr = (WINDOW + ROWS - 1) // ROWS
    at = block * ROWS + tl.arange(0, ROWS)
    ago = WINDOW - 1 - at
    slot = (position % n_slots).to(tl.int32) - ago
    index = tl.where(slot < 0, slot + n_slots, slot)
    seen = (ago >= 0) & (ago <= position)
    if SELECTED > 0:  # noqa: SIM102  known when compiled
        if block >= WINDOW_BLOCKS:
            entry = at - WINDOW_BLOCKS * ROWS
            index = tl.load(selection + entry, mask=entry < SELECTED, other=-1)
            seen = index >= 0
    return index, seen


@triton.jit
def _rows(
    ring, rows, index, seen, start, block,
    WINDOW: tl.constexpr, SELECTED: tl.constexpr, ROWS: tl.constexpr,
    K: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return channels start .. of the block's rows [ROWS, COLUMNS] as stored, 0 where not seen."""
    WINDOW_BLOCKS: tl.constexpr = (WINDOW + ROWS - 1) // ROWS
    at = start + tl.arange(0, COLUMNS)
    inside = seen[:, None] & (at < K)[None, :]
    base = ring
    if SELECTED > 0:  # noqa: SIM102  known when compiled
        if block >= WINDOW_BLOCKS:
            base = rows
    return tl.load(base + index[:, None].to(tl.int64) * K + at[None, :], mask=inside, other=0.0)


@triton.jit
def _weights(dots, seen, scale):
    """Return the block's largest score (in powers of two), weights [ROWS, HEADS] and their sum."""
    # Added to 0, the product is rounded here: fused into a later sum it would depend on `splits`.
    largest = tl.fma(tl.max(tl.where(seen[:, None], dots, _LOWEST), 0), scale, 0.0)
    weights = tl.exp2(tl.fma(dots, scale, -largest[None, :]))
    weights = tl.where(seen[:, None], weights, 0.0)
    return largest, weights, tl.sum(weights, 0)


@triton.jit
def _weighted(tile, weights, TENSOR: tl.constexpr):
    """Return the sums of a block's rows [ROWS, COLUMNS] by each head's weights [COLUMNS, HEADS]."""
    if TENSOR:
        # Two bf16 parts hold 16 bits of a weight; rows are exact in bf16.
        # Heads come first: else Triton 3.6 addresses shared memory that is not there.
        high = weights.to(tl.bfloat16)
        low = (weights - high.to(tl.float32)).to(tl.bfloat16)
        sums = tl.trans(tl.dot(tl.trans(high), tile) + tl.dot(tl.trans(low), tile))
    else:
        sums = tl.dot(tl.trans(tile.to(tl.float32)), weights, input_precision="ieee")
    return sums


@triton.jit
def _keep(partial, sums, weighted, largest, total, place, there, K: tl.constexpr):
    """Write a block's results for the kernel that merges them."""
    at = tl.arange(0, weighted.shape[0])
    inside = (at < K)[:, None] & there[None, :]
    tl.store(partial + place[None, :] * K + at[:, None], weighted, mask=inside)
    tl.store(sums + 2 * place, largest, mask=there)
    tl.store(sums + 2 * place + 1, total, mask=there)


@triton.jit
def _merged(largest, total, block_largest, block_total):
    """Return the merged largest score and sum, and the factors of both parts' weighted rows."""
    top = tl.maximum(largest, block_largest)
    kept, added = tl.exp2(largest - top), tl.exp2(block_largest - top)
    return top, tl.fma(total, kept, block_total * added), kept, added


@triton.jit
def _store(
    out, rows, largest, total, sink, turns, head,
    N_HEADS: tl.constexpr, K: tl.constexpr, TURNED: tl.constexpr,
    COLUMNS: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """Store the averages of weighted rows [HEADS, COLUMNS], rounded, turned back, rounded."""
    there = head < N_HEADS
    logit = tl.load(sink + head, mask=there, other=0.0)
    above = tl.fma(logit, _LOG2_E, -largest)
    total += tl.exp2(tl.where(above > 127.0, 127.0, above))
    average = rows / total[:, None]
    if BF16:
        average = round_to_bf16(average)
    average = turn_pairs(average, turns, 0, K - TURNED, TURNED, True)
    if BF16:
        average = round_to_bf16(average)
    at = tl.arange(0, COLUMNS)
    inside = there[:, None] & (at < K)[None, :]
    tl.store(out + head[:, None] * K + at[None, :], average, mask=inside)


@triton.jit
def _attend_kernel(
    q, first, turns, ring, rows, selection, sink, out, partial, sums, n_slots, scale,
    N_HEADS: tl.constexpr, K: tl.constexpr, TURNED: tl.constexpr, WINDOW: tl.constexpr,
    SELECTED: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr, N_BLOCKS: tl.constexpr, SPLITS: tl.constexpr, BF16: tl.constexpr,
    TENSOR: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    join_previous(EARLY)
    token = tl.program_id(2).to(tl.int64)
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    there = head < N_HEADS
    position = tl.load(first) + token
    q += token * N_HEADS * K
    turns += position * TURNED
    selection += token * SELECTED
    largest = tl.full([HEADS], _LOWEST, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    merged = tl.zeros([COLUMNS, HEADS], tl.float32)
    if TENSOR:
        queries = _queries(q, turns, head, 0, N_HEADS, K, TURNED, COLUMNS, BF16).to(tl.bfloat16)
    for step in range((N_BLOCKS + SPLITS - 1) // SPLITS):
        block = step * SPLITS + tl.program_id(1)  # nothing of a block past the last is seen
        place = (token * N_BLOCKS + block) * N_HEADS + head
        index, seen = _listed(position, selection, n_slots, block, WINDOW, SELECTED, ROWS)
        any_seen = tl.max(seen.to(tl.int32), 0) > 0
        if any_seen:
            tile = _rows(ring, rows, index, seen, 0, block, WINDOW, SELECTED, ROWS, K, COLUMNS)
            if TENSOR:
                dots = tl.dot(tile, tl.trans(queries))
            else:
                dots = tl.zeros([ROWS, HEADS], tl.float32)
                for start in range(0, COLUMNS, CHUNK):
                    part = _rows(
                        ring, rows, index, seen, start, block, WINDOW, SELECTED, ROWS, K, CHUNK
                    ).to(tl.float32)  # fmt: skip
                    query = _queries(q, turns, head, start, N_HEADS, K, TURNED, CHUNK, BF16)
                    dots = tl.dot(part, tl.trans(query), dots, input_precision="ieee")
            block_largest, weights, block_total = _weights(dots, seen, scale)
            weighted = _weighted(tile, weights, TENSOR)
            if SPLITS == 1:
                largest, total, kept, added = _merged(largest, total, block_largest, block_total)
                merged = tl.fma(merged, kept[None, :], weighted * added[None, :])
            else:
                _keep(partial, sums, weighted, block_largest, block_total, place, there, K)
        elif SPLITS > 1:
            inside = there & (tl.full([HEADS], block, tl.int32) < N_BLOCKS)
            tl.store(sums + 2 * place + 1, tl.zeros([HEADS], tl.float32), mask=inside)
    if SPLITS == 1:
        out += token * N_HEADS * K
        _store(
            out, tl.trans(merged), largest, total, sink, turns, head,
            N_HEADS, K, TURNED, COLUMNS, BF16,
        )  # fmt: skip


@triton.jit
def _merge_kernel(
    first, turns, sink, out, partial, sums,
    N_HEADS: tl.constexpr, K: tl.constexpr, TURNED: tl.constexpr, COLUMNS: tl.constexpr,
    N_BLOCKS: tl.constexpr, BF16: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    join_previous(EARLY)
    token = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) + tl.arange(0, 1)
    at = tl.arange(0, COLUMNS)
    largest = tl.full([1], _LOWEST, tl.float32)
    total = tl.zeros([1], tl.float32)
    merged = tl.zeros([1, COLUMNS], tl.float32)
    for block in tl.static_range(N_BLOCKS):  # ascending: the order decides bits
        place = (token * N_BLOCKS + block) * N_HEADS + head
        block_total = tl.load(sums + 2 * place + 1)
        seen = block_total != 0.0  # the largest weight of a seen block is about 1, or no number
        block_largest = tl.load(sums + 2 * place, mask=seen, other=_LOWEST)
        inside = seen[:, None] & (at < K)[None, :]
        weighted = tl.load(partial + place[:, None] * K + at[None, :], mask=inside, other=0.0)
        top, sum_, kept, added = _merged(largest, total, block_largest, block_total)
        both = tl.fma(merged, kept[:, None], weighted * added[:, None])
        largest, total = tl.where(seen, top, largest), tl.where(seen, sum_, total)
        merged = tl.where(seen[:, None], both, merged)
    turns += (tl.load(first) + token) * TURNED
    out += token * N_HEADS * K
    _store(out, merged, largest, total, sink, turns, head, N_HEADS, K, TURNED, COLUMNS, BF16)


def attend_sparse(
    q: Tensor,
    first: Tensor,
    turns: Tensor,
    ring: Tensor,
    window: int,
    rows: Tensor | None,
    selection: Tensor | None,
    sink: Tensor,
    *,
    dtype: torch.dtype,
    splits: int = 1,
    scratch: Tensor | None = None,
    out: Tensor | None = None,
    plain: bool = False,
) -> Tensor:
    """Rotate each query, attend over what it sees, rotate the result back.

    q          [T, heads * k] f32 or `dtype`, contiguous; rounded to `dtype` before anything else
    first      [1] int64 on the device, position of row 0
    turns      [P, r / 2, 2] f32, (cos, sin) by position, P >= first + T
    ring       [W, k] `dtype`, the window row of position p at slot p mod W; W >= window + T - 1
    window     a query at p sees the window rows of positions max(0, p - window + 1) .. p
    rows       [G, k] `dtype`, compressed rows; None without a selection
    selection  [T, S] i32, rows that a query sees besides, -1 = none; None = none at all
    sink       [heads] f32, a logit that is not scaled
    dtype      of activations: bf16 or f32; rows of bf16 take tensor cores on a GPU
    splits     programs that share a query's rows, 1 to 16: many for one token, 1 for a chunk
    scratch    f32, at least `scratch_values` of them, for splits above 1
    plain      takes f32 products on a GPU too, for comparison
    returns    [T, heads * k] as q, exact in `dtype`, in `out` where given, f32 or `dtype`

    Raises ValueError on a shape or dtype that differs. Within 1e-5 (relative to the row's norm) of
    `reference.attend_sparse` in f32; in bf16 within 2e-3, a value near a tie moving by one ulp.
    Source: model specification, section 3.3, steps 1, 4 and 5.
    """
    out = checked(q, first, turns, ring, window, rows, selection, sink, dtype, out)
    if not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"attend_sparse: {splits} splits, wanted 1 to {MAX_SPLITS}")
    if not runs_kernels(q):
        inputs = (q, first, turns, ring, window, rows, selection, sink)
        return out.copy_(reference.attend_sparse(*inputs, dtype=dtype))
    n_tokens, n_heads, k = len(q), len(sink), ring.shape[1]
    if n_tokens == 0:
        return out
    n_selected = 0 if selection is None else selection.shape[1]
    bf16 = dtype == torch.bfloat16
    tensor = bf16 and not (plain or interpreted())
    block_rows = TENSOR_ROWS if tensor else PLAIN_ROWS
    blocks = n_blocks(window, n_selected, block_rows)
    splits = min(splits, blocks)
    partial = sums = out
    if splits > 1:
        partial, sums = scratch_parts(scratch, n_tokens * blocks * n_heads, k, q)
    columns = max(16, triton.next_power_of_2(k))
    sizes = {"N_HEADS": n_heads, "K": k, "TURNED": 2 * turns.shape[1], "COLUMNS": columns}
    sizes |= {"N_BLOCKS": blocks, "BF16": bf16} | early(q.device)
    _attend_kernel[(triton.cdiv(n_heads, _HEADS), splits, n_tokens)](
        q, first, turns, ring, ring if rows is None else rows,
        first if selection is None else selection, sink, out, partial, sums,
        len(ring), k**-0.5 * 1.4426950408889634,
        WINDOW=window, SELECTED=n_selected, HEADS=_HEADS, ROWS=block_rows,
        CHUNK=min(columns, 64), SPLITS=splits, TENSOR=tensor, num_warps=_WARPS, **sizes,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(n_heads, n_tokens)](first, turns, sink, out, partial, sums, **sizes)
    return out
