"""An id drawn from its logits, the same on every machine."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import can_be_read, runs_kernels
from .draw_best import draw_best
from .id_weights import load_weights, share_of, store_id
from .libm import exp_powers
from .reference import draw as reference
from .tensor_checks import check_contiguous, check_tensor

_BLOCK = 1024
_MOST = 1 << 19  # of ids: a program holds the counts of all their blocks


@triton.jit
def _sum_weights_kernel(logits, likeliest, numbers, powers, sums, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    weights, _ = load_weights(logits, at, n, likeliest, numbers, powers)
    kept = tl.where(weights >= tl.load(numbers + 3), weights, 0)
    tl.store(sums + tl.program_id(0), tl.sum(kept, 0))


@triton.jit
def _draw_kernel(
    logits, likeliest, numbers, powers, sums, out, n_parts, n,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    parts = tl.arange(0, PARTS)
    sums_here = tl.load(sums + parts, mask=parts < n_parts, other=0)
    total = tl.sum(sums_here, 0)
    point = share_of(total, tl.load(numbers + 4))
    ends = tl.cumsum(sums_here, 0)
    part = tl.minimum(tl.sum((ends <= point).to(tl.int32), 0), n_parts - 1)
    rest = point - tl.sum(tl.where(parts < part, sums_here, 0), 0)
    at = part * BLOCK + tl.arange(0, BLOCK)
    weights, _ = load_weights(logits, at, n, likeliest, numbers, powers)
    kept = tl.where(weights >= tl.load(numbers + 3), weights, 0)
    place = tl.sum((tl.cumsum(kept, 0) <= rest).to(tl.int32), 0)
    store_id(out, (part * BLOCK + place).to(tl.int64), likeliest)


def draw(
    logits: Tensor,
    likeliest: Tensor,
    numbers: Tensor,
    *,
    filtered: bool,
    out: Tensor | None = None,
) -> Tensor:
    """Return an id drawn from logits, and whether a logit is NaN.

    logits     [vocab] f32, contiguous
    likeliest  [2] i64, what `kernels.likeliest` says of them
    numbers    [5] i64: what the draw is made with, as `reference.draw` has it
    filtered   whether top_k or top_p may be among the numbers; else both are 0
    returns    [2] i64: (id, 0 or 1), in `out` where given, which may lie in page-locked memory

    Raises ValueError on a shape or dtype that differs. Equal to `reference.draw`. Reads the numbers
    as it runs, so that a recorded launch serves all of them.
    """
    if logits.dim() != 1 or logits.dtype != torch.float32:
        raise ValueError(f"draw: logits are {logits.dtype} {tuple(logits.shape)}, wanted f32 [n]")
    check_contiguous("draw", logits=logits)
    if not 1 <= logits.shape[0] <= _MOST:
        raise ValueError(f"draw: {logits.shape[0]} logits, wanted 1 to {_MOST}")
    if out is None:
        out = torch.empty(2, dtype=torch.int64, device=logits.device)
    check_tensor("draw", "likeliest", likeliest, (2,), torch.int64)
    check_tensor("draw", "numbers", numbers, (5,), torch.int64)
    check_tensor("draw", "out", out, (2,), torch.int64)
    if not all(can_be_read(tensor, logits) for tensor in (likeliest, numbers, out)):
        raise ValueError(
            "draw: likeliest, numbers and out lie beside the logits or are page-locked"
        )
    if not runs_kernels(logits):
        return out.copy_(reference.draw(logits, likeliest, numbers))
    if filtered:
        draw_best(logits, likeliest, numbers, out)
    else:
        _draw_any(logits, likeliest, numbers, out)
    return out


def _draw_any(logits: Tensor, likeliest: Tensor, numbers: Tensor, out: Tensor) -> None:
    n, powers = logits.shape[0], exp_powers(logits.device)
    n_parts = triton.cdiv(n, _BLOCK)
    sums = torch.empty(n_parts, dtype=torch.int64, device=logits.device)
    _sum_weights_kernel[(n_parts,)](logits, likeliest, numbers, powers, sums, n, BLOCK=_BLOCK)
    _draw_kernel[(1,)](
        logits, likeliest, numbers, powers, sums, out, n_parts, n,
        PARTS=triton.next_power_of_2(n_parts), BLOCK=_BLOCK,
    )  # fmt: skip
