"""The id of the largest logit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import runs_kernels
from .reference import likeliest as reference
from .tensor_checks import check_contiguous, check_tensor

_BLOCK = 1024
_NAN_RANK = tl.constexpr(2147483647)


@triton.jit
def _rank(logits):
    """Whole numbers in the order of the logits: -0.0 equals 0.0, NaN is above all."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(logits == logits, ordered, _NAN_RANK)  # noqa: PLR0124  NaN


@triton.jit
def _likeliest_parts_kernel(logits, ranks, ids, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    rank = _rank(tl.load(logits + at, mask=inside, other=float("-inf")))
    best = tl.max(rank, 0)
    first = tl.min(tl.where((rank == best) & inside, at, n), 0)
    tl.store(ranks + tl.program_id(0), best)
    tl.store(ids + tl.program_id(0), first)


@triton.jit
def _likeliest_kernel(ranks, ids, out, n_parts, n, PARTS: tl.constexpr):
    at = tl.arange(0, PARTS)
    rank = tl.load(ranks + at, mask=at < n_parts, other=-2147483648)
    part = tl.load(ids + at, mask=at < n_parts, other=n)
    best = tl.max(rank, 0)
    tl.store(out, tl.min(tl.where(rank == best, part, n), 0).to(tl.int64))
    tl.store(out + 1, (best == _NAN_RANK).to(tl.int64))


def likeliest(logits: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the id of the largest logit, the lowest among equals, and whether a logit is NaN.

    logits   [vocab] f32, contiguous
    returns  [2] i64: (id, 0 or 1), in `out` where given; with a NaN the id is that of the first

    Raises ValueError on a shape or dtype that differs. Equal to `reference.likeliest`.
    """
    if logits.dim() != 1 or logits.dtype != torch.float32:
        raise ValueError(f"likeliest: logits are {logits.dtype} {tuple(logits.shape)}, wanted f32")
    check_contiguous("likeliest", logits=logits)
    if logits.shape[0] == 0:
        raise ValueError("likeliest: no logits")
    if out is None:
        out = torch.empty(2, dtype=torch.int64, device=logits.device)
    check_tensor("likeliest", "out", out, (2,), torch.int64)
    if not runs_kernels(logits):
        return out.copy_(reference.likeliest(logits))
    n = logits.shape[0]
    n_parts = triton.cdiv(n, _BLOCK)
    parts = torch.empty((2, n_parts), dtype=torch.int32, device=logits.device)
    _likeliest_parts_kernel[(n_parts,)](logits, parts[0], parts[1], n, BLOCK=_BLOCK)
    _likeliest_kernel[(1,)](
        parts[0], parts[1], out, n_parts, n, PARTS=triton.next_power_of_2(n_parts)
    )
    return out
