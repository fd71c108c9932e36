"""The residual streams after a sublayer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bf16_bits import round_to_bf16
from .device import runs_kernels
from .reference import hc_expand as reference

_BLOCK = 256


@triton.jit
def _hc_expand_kernel(
    y,
    streams,
    post,
    comb,
    out,
    width,
    N_STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    BF16: tl.constexpr,
):
    token = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    row = tl.load(y + token * width + at, mask=inside, other=0.0).to(tl.float32)
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
    y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """Add a sublayer's row to the mixed streams.

    y        [T, H] bf16 or f32
    streams  [T, S, H] bf16 or f32
    post     [T, S] f32
    comb     [T, S, S] f32, the first index is summed
    returns  [T, S, H], dtype of streams, in `out` where given (not `streams` itself)

    Raises ValueError on a shape that differs. Within 1e-6 (relative, f32) of `reference.hc_expand`.
    Source: model specification, section 3.1, EXPAND.
    """
    n_tokens, n_streams, width = streams.shape
    if tuple(y.shape) != (n_tokens, width) or tuple(post.shape) != (n_tokens, n_streams):
        raise ValueError(
            f"hc_expand: y {tuple(y.shape)} and post {tuple(post.shape)} "
            f"for streams {tuple(streams.shape)}"
        )
    if tuple(comb.shape) != (n_tokens, n_streams, n_streams):
        raise ValueError(f"hc_expand: comb {tuple(comb.shape)} for streams {tuple(streams.shape)}")
    if not runs_kernels(y):
        return reference.hc_expand(y, streams, post, comb)
    if out is None:
        out = torch.empty_like(streams)
    if n_tokens:
        grid = (triton.cdiv(width, _BLOCK), n_tokens)
        _hc_expand_kernel[grid](
            y.contiguous(), streams.contiguous(), post.contiguous(), comb.contiguous(), out, width,
            N_STREAMS=n_streams, BLOCK=_BLOCK, BF16=streams.dtype == torch.bfloat16,
        )  # fmt: skip
    return out
