"""What the launcher of sparse attention refuses, and the sizes that it chooses."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from .norm_latents import check_positions
from .tensor_checks import check_contiguous

TENSOR_ROWS, PLAIN_ROWS = 64, 32  # of a block


def n_blocks(window: int, n_selected: int, rows: int) -> int:
    """Return the blocks of a query's rows."""
    return int(triton.cdiv(window, rows) + triton.cdiv(n_selected, rows))


def scratch_values(n_tokens: int, n_heads: int, k: int, window: int, n_selected: int) -> int:
    """Return the f32 values of scratch that any number of splits needs."""
    return n_tokens * n_blocks(window, n_selected, PLAIN_ROWS) * n_heads * (k + 2)


def scratch_parts(scratch: Tensor | None, n: int, k: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return room for n weighted sums of k values, and for n pairs of largest score and sum.

    Raises ValueError where the scratch given is too small.
    """
    if scratch is None:
        scratch = torch.empty(n * (k + 2), dtype=torch.float32, device=like.device)
    check_contiguous("attend_sparse", scratch=scratch)
    if scratch.dtype != torch.float32 or scratch.numel() < n * (k + 2):
        raise ValueError(
            f"attend_sparse: scratch is {scratch.dtype} {tuple(scratch.shape)}, "
            f"wanted f32 [{n * (k + 2)}]"
        )
    values = scratch.view(-1)
    return values[: n * k], values[n * k :]


def checked(
    q: Tensor,
    first: Tensor,
    turns: Tensor,
    ring: Tensor,
    window: int,
    rows: Tensor | None,
    selection: Tensor | None,
    sink: Tensor,
    dtype: torch.dtype,
    out: Tensor | None,
) -> Tensor:
    """Raise ValueError unless everything fits; return the tensor for the result."""
    n_tokens, k = q.shape[0], ring.shape[1]
    if q.dtype not in {torch.float32, dtype} or tuple(q.shape) != (n_tokens, len(sink) * k):
        raise ValueError(
            f"attend_sparse: q is {q.dtype} {tuple(q.shape)} for {len(sink)} heads of {k}"
        )
    if dtype not in {torch.bfloat16, torch.float32} or ring.dtype != dtype or ring.dim() != 2:
        raise ValueError(f"attend_sparse: the ring is {ring.dtype}, activations are {dtype}")
    if window < 1 or len(ring) < window + max(n_tokens, 1) - 1:
        raise ValueError(
            f"attend_sparse: a ring of {len(ring)} rows for {n_tokens} tokens, window {window}"
        )
    _check_selection(rows, selection, n_tokens, k, dtype)
    check_positions("attend_sparse", first, turns, k)
    if sink.dtype != torch.float32:
        raise ValueError(f"attend_sparse: sink is {sink.dtype}")
    if out is None:
        out = torch.empty_like(q)
    if out.dtype not in {torch.float32, dtype} or out.shape != q.shape:
        raise ValueError(f"attend_sparse: out is {out.dtype} {tuple(out.shape)}")
    check_contiguous(
        "attend_sparse", q=q, ring=ring, rows=rows, selection=selection, sink=sink, out=out
    )
    return out


def _check_selection(
    rows: Tensor | None, selection: Tensor | None, n_tokens: int, k: int, dtype: torch.dtype
) -> None:
    if rows is None and selection is None:
        return
    if rows is None or selection is None:
        raise ValueError("attend_sparse: rows and selection go together")
    if rows.dtype != dtype or rows.dim() != 2 or rows.shape[1] != k:
        raise ValueError(f"attend_sparse: rows are {rows.dtype} {tuple(rows.shape)}")
    if selection.dtype != torch.int32 or selection.dim() != 2 or len(selection) != n_tokens:
        raise ValueError(f"attend_sparse: selection is {selection.dtype} {tuple(selection.shape)}")
