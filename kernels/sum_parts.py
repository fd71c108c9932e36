"""What a token's experts gave, added in the order of its plan."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bf16_bits import round_to_bf16
from .device import runs_kernels
from .reference import sum_parts as reference

_BLOCK = 1024


@triton.jit
def _sum_parts_kernel(
    parts,
    places,
    shared,
    out,
    width,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
    BF16: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    total = tl.zeros([BLOCK], tl.float32)
    for pick in tl.static_range(K):  # plan order decides bits
        place = tl.load(places + token * K + pick).to(tl.int64)
        total += tl.load(parts + place * width + at, mask=inside, other=0.0).to(tl.float32)
    if SHARED:
        total += tl.load(shared + token * width + at, mask=inside, other=0.0).to(tl.float32)
    if BF16:
        total = round_to_bf16(total)
    tl.store(out + token * width + at, total, mask=inside)


def sum_parts(
    parts: Tensor,
    places: Tensor,
    shared: Tensor | None = None,
    *,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """Add the parts of each token one after the other in f32, the shared expert's row last.

    parts    [R, H] bf16 or f32, contiguous
    places   [T, K] i32, each token's rows of `parts` in plan order, contiguous
    shared   [T, H] bf16 or f32, contiguous, where given
    dtype    of the result: bf16 or f32
    returns  [T, H] `dtype`, in `out` where given

    Raises ValueError on a shape that differs. Bits equal `reference.sum_parts`.
    Source: model specification, section 3.7.
    """
    n_tokens, width = places.shape[0], parts.shape[1]
    if places.dtype != torch.int32 or not (places.is_contiguous() and parts.is_contiguous()):
        raise ValueError(f"sum_parts: places are {places.dtype}, wanted int32; both contiguous")
    if shared is not None and (tuple(shared.shape) != (n_tokens, width)):
        raise ValueError(f"sum_parts: shared is {tuple(shared.shape)}, not {(n_tokens, width)}")
    if out is None:
        out = torch.empty((n_tokens, width), dtype=dtype, device=parts.device)
    if not runs_kernels(parts):
        return out.copy_(reference.sum_parts(parts, places, shared, dtype))
    if n_tokens:
        _sum_parts_kernel[n_tokens, triton.cdiv(width, _BLOCK)](
            parts, places, parts if shared is None else shared.contiguous(), out, width,
            K=places.shape[1], BLOCK=_BLOCK, SHARED=shared is not None,
            BF16=dtype == torch.bfloat16,
        )  # fmt: skip
    return out
