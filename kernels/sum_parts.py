"""What a token's experts gave, added in the order of its plan.

Invariant: `plan_sum` is the one place where experts are added, for one token and for many: the same
parts give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bf16_bits import round_to_bf16
from .device import runs_kernels
from .early_launch import early, join_previous
from .reference import sum_parts as reference
from .tensor_checks import check_contiguous, check_tensor

_BLOCK, _BLOCK_OF_ONE = 1024, 256  # channels of a program


@triton.jit
def plan_sum(
    parts, places, present, at, width, K: tl.constexpr, PLACED: tl.constexpr, PRESENT: tl.constexpr
):
    """Return channels `at` of a token's K parts, added one after the other in f32.

    places   its rows of parts where PLACED, else they are its first K rows
    present  0 for each part that is not read, where PRESENT
    """
    total = tl.zeros([at.shape[0]], tl.float32)
    for pick in tl.static_range(K):  # plan order decides bits
        row = parts + pick * width
        if PLACED:
            row = parts + tl.load(places + pick).to(tl.int64) * width
        end = width
        if PRESENT:
            end = tl.where(tl.load(present + pick) == 0, 0, width)
        total += tl.load(row + at, mask=at < end, other=0.0).to(tl.float32)
    return total


@triton.jit
def _sum_parts_kernel(
    parts,
    places,
    present,
    shared,
    out,
    width,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACED: tl.constexpr,
    PRESENT: tl.constexpr,
    SHARED: tl.constexpr,
    BF16: tl.constexpr,
    EARLY: tl.constexpr,
):
    join_previous(EARLY)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    total = plan_sum(parts, places + token * K, present, at, width, K, PLACED, PRESENT)
    if SHARED:
        total += tl.load(shared + token * width + at, mask=inside, other=0.0).to(tl.float32)
    if BF16:
        total = round_to_bf16(total)
    tl.store(out + token * width + at, total, mask=inside)


def sum_parts(
    parts: Tensor,
    places: Tensor | None,
    shared: Tensor | None = None,
    *,
    dtype: torch.dtype,
    present: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Add the parts of each token one after the other in f32, the shared expert's row last.

    parts    [R, H] bf16 or f32, contiguous
    places   [T, K] i32, each token's rows of `parts` in plan order, contiguous; None: all of them
             are those of one token
    shared   [T, H] bf16 or f32, contiguous, where given
    dtype    of the result: bf16 or f32
    present  [R] i64, where given: rows of one token's parts that are 0 here are not read
    returns  [T, H] `dtype`, in `out` where given

    Raises ValueError on a shape, dtype or stride that differs. Bits equal `reference.sum_parts`.
    Source: model specification, section 3.7.
    """
    width = parts.shape[1]
    n_tokens, top_k = (1, parts.shape[0]) if places is None else places.shape
    if places is not None and places.dtype != torch.int32:
        raise ValueError(f"sum_parts: places are {places.dtype}, wanted int32")
    if present is not None and places is not None:
        raise ValueError("sum_parts: absent ones are of one token")
    check_contiguous("sum_parts", parts=parts, places=places)
    if present is not None:
        check_tensor("sum_parts", "present", present, (top_k,), torch.int64)
    if shared is not None and (tuple(shared.shape) != (n_tokens, width)):
        raise ValueError(f"sum_parts: shared is {tuple(shared.shape)}, not {(n_tokens, width)}")
    if out is None:
        out = torch.empty((n_tokens, width), dtype=dtype, device=parts.device)
    check_tensor("sum_parts", "out", out, (n_tokens, width), torch.float32, dtype)
    if not runs_kernels(parts):
        return out.copy_(reference.sum_parts(parts, places, shared, dtype, present))
    if n_tokens:
        block = _BLOCK_OF_ONE if places is None else _BLOCK
        _sum_parts_kernel[n_tokens, triton.cdiv(width, block)](
            parts, parts if places is None else places, parts if present is None else present,
            parts if shared is None else shared.contiguous(), out, width,
            K=top_k, BLOCK=block, PLACED=places is not None, PRESENT=present is not None,
            SHARED=shared is not None, BF16=dtype == torch.bfloat16, **early(parts.device),
        )  # fmt: skip
    return out
