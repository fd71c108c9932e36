"""The residual streams after a sublayer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bf16_bits import round_to_bf16
from .device import runs_kernels
from .early_launch import early, join_previous
from .reference import hc_expand as reference
from .reference.sum_parts import sum_parts
from .sum_parts import plan_sum
from .tensor_checks import check_tensor

_BLOCK = 256


@triton.jit
def _hc_expand_kernel(
    y,
    present,
    shared,
    streams,
    post,
    comb,
    out,
    width,
    N_STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    BF16: tl.constexpr,
    SHARED: tl.constexpr,
    ROW_BF16: tl.constexpr,
    N_PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    join_previous(EARLY)
    token = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    if N_PARTS:
        row = plan_sum(y, y, present, at, width, N_PARTS, False, True)
    else:
        row = tl.load(y + token * width + at, mask=inside, other=0.0).to(tl.float32)
    if SHARED:
        other = tl.load(shared + token * width + at, mask=inside, other=0.0).to(tl.float32)
        if ROW_BF16:
            other = round_to_bf16(other)
        row += other
    if ROW_BF16:
        row = round_to_bf16(row)
    streams += token * N_STREAMS * width
    out += token * N_STREAMS * width
    post += token * N_STREAMS
    comb += token * N_STREAMS * N_STREAMS
    for target in tl.static_range(N_STREAMS):
        total = tl.load(post + target) * row
        for source in tl.static_range(N_STREAMS):  # ascending: the order decides bits
            stream = tl.load(streams + source * width + at, mask=inside, other=0.0)
            total += tl.load(comb + source * N_STREAMS + target) * stream.to(tl.float32)
        if BF16:
            total = round_to_bf16(total)
        tl.store(out + target * width + at, total, mask=inside)


def hc_expand(
    y: Tensor,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    *,
    present: Tensor | None = None,
    shared: Tensor | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Add a sublayer's row to the mixed streams.

    y        [T, H] bf16 or f32
    streams  [T, S, H] bf16 or f32
    post     [T, S] f32
    comb     [T, S, S] f32, the first index is summed
    present  [K] i64, contiguous, where given: y is then [K, H] f32, what one token's experts gave
             in plan order, and those that are 0 here are not read; T is 1
    shared   [T, H] f32: the shared expert's row, added to y last, where given
    dtype    what the shared row, and then y, are rounded to; None: they are taken as they are
    returns  [T, S, H], dtype of streams, in `out` where given (not `streams` itself)

    Inputs that are not contiguous are copied. Raises ValueError on a shape that differs, and on
    another dtype or stride of `present` or `out`. Within 1e-6 (relative, f32) of
    `reference.hc_expand`. Source: model specification, section 3.1, EXPAND.
    """
    n_tokens, n_streams, width = streams.shape
    n_rows = n_tokens if present is None else present.shape[0]
    if present is not None and n_tokens != 1:
        raise ValueError(f"hc_expand: parts of one token, streams of {n_tokens}")
    if tuple(y.shape) != (n_rows, width) or tuple(post.shape) != (n_tokens, n_streams):
        raise ValueError(
            f"hc_expand: y {tuple(y.shape)} and post {tuple(post.shape)} "
            f"for streams {tuple(streams.shape)}"
        )
    if tuple(comb.shape) != (n_tokens, n_streams, n_streams):
        raise ValueError(f"hc_expand: comb {tuple(comb.shape)} for streams {tuple(streams.shape)}")
    if shared is not None and tuple(shared.shape) != (n_tokens, width):
        raise ValueError(
            f"hc_expand: shared {tuple(shared.shape)} for streams {tuple(streams.shape)}"
        )
    if present is not None:
        check_tensor("hc_expand", "present", present, (n_rows,), torch.int64)
    if out is None:
        out = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    check_tensor("hc_expand", "out", out, tuple(streams.shape), streams.dtype)
    if not runs_kernels(y):
        if present is not None:
            y = sum_parts(y, None, None, torch.float32, present)
        row = y if shared is None else y.float() + shared.to(dtype or shared.dtype).float()
        return out.copy_(reference.hc_expand(row.to(dtype or row.dtype), streams, post, comb))
    if n_tokens:
        grid = (triton.cdiv(width, _BLOCK), n_tokens)
        _hc_expand_kernel[grid](
            y.contiguous(), y if present is None else present,
            y if shared is None else shared.contiguous(), streams.contiguous(),
            post.contiguous(), comb.contiguous(), out, width,
            N_STREAMS=n_streams, BLOCK=_BLOCK, BF16=streams.dtype == torch.bfloat16,
            SHARED=shared is not None, ROW_BF16=dtype == torch.bfloat16,
            N_PARTS=0 if present is None else n_rows, **early(y.device),
        )  # fmt: skip
    return out
