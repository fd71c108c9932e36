"""The row that a sublayer reads: the streams mixed into one, then its RMS norm."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bf16_bits import round_to_bf16
from .byte_planes import Planes, byte_planes, check_planes, store_byte_planes
from .device import runs_kernels
from .early_launch import early, join_previous
from .reference import hc_collapse as reference
from .reference.round_fp8 import round_fp8
from .round_fp8 import round_groups_to_fp8
from .tensor_checks import check_contiguous, check_tensor


@triton.jit
def _hc_collapse_norm_kernel(
    streams,
    pre,
    weight,
    out,
    rounded,
    planes,
    offsets,
    scales,
    width,
    eps,
    N_STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    BF16: tl.constexpr,
    ROUNDS: tl.constexpr,
    PLANES: tl.constexpr,
    EARLY: tl.constexpr,
):
    join_previous(EARLY)
    token = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < width
    streams += token * N_STREAMS * width
    row = tl.zeros([BLOCK], tl.float32)
    for stream in tl.static_range(N_STREAMS):  # ascending: the order decides bits
        value = tl.load(streams + stream * width + at, mask=inside, other=0.0).to(tl.float32)
        row += tl.load(pre + token * N_STREAMS + stream) * value
    if BF16:
        row = round_to_bf16(row)
    inverse = tl.rsqrt(tl.sum(row * row, 0) / width + eps)
    row = tl.load(weight + at, mask=inside, other=0.0) * (row * inverse)
    if BF16:
        row = round_to_bf16(row)
    tl.store(out + token * width + at, row, mask=inside)
    if ROUNDS:
        groups = tl.reshape(row, [BLOCK // 32, 32])
        codes = tl.reshape(round_groups_to_fp8(groups), [BLOCK])
        tl.store(rounded + token * width + at, codes, mask=inside)
    if PLANES:
        group = tl.arange(0, BLOCK // 32)
        n_groups = width // 32
        skip = token * n_groups
        store_byte_planes(
            tl.reshape(row, [BLOCK // 32, 8, 4]),
            planes + skip * 24, offsets + skip, scales + skip, group, n_groups,
        )  # fmt: skip


def hc_collapse_norm(
    streams: Tensor,
    pre: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
    rounded: Tensor | None = None,
    planes: Planes | None = None,
) -> Tensor:
    """Mix the streams into one row and scale it to unit mean square.

    streams  [T, S, H] bf16 or f32, contiguous
    pre      [T, S] f32, contiguous
    weight   [H] f32, contiguous
    dtype    of the mixed row before its norm and of the result: bf16 or f32
    rounded  [T, H] f32 or bf16: the result rounded to fp8 as well, where given; H a multiple of 32
    planes   of `byte_planes`: the result's, where given; H a multiple of 32
    returns  [T, H] `dtype`, in `out` where given; `out` may be f32 whatever `dtype` is

    Raises ValueError on a shape, dtype or stride that differs. Within 2e-6 (relative, f32) of
    `reference.hc_collapse_norm`; in bf16 a value on a rounding tie may move by one ulp.
    Source: model specification, sections 2.2, 2.3 and 3.1, COLLAPSE.
    """
    n_tokens, n_streams, width = streams.shape
    if out is None:
        out = torch.empty((n_tokens, width), dtype=dtype, device=streams.device)
    _check(streams, pre, weight, out, rounded, planes, dtype)
    if not runs_kernels(streams):
        out.copy_(reference.hc_collapse_norm(streams, pre, weight, eps, dtype))
        if rounded is not None:
            rounded.copy_(round_fp8(out))
        if planes is not None:
            byte_planes(out, out=planes)
        return out
    if n_tokens:
        block = triton.next_power_of_2(width)
        _hc_collapse_norm_kernel[(n_tokens,)](
            streams, pre, weight, out, out if rounded is None else rounded,
            *((out, out, out) if planes is None else planes), width, eps,
            N_STREAMS=n_streams, BLOCK=block, BF16=dtype == torch.bfloat16,
            ROUNDS=rounded is not None, PLANES=planes is not None,
            num_warps=min(32, max(1, block // 256)), **early(streams.device),
        )  # fmt: skip
    return out


def _check(
    streams: Tensor,
    pre: Tensor,
    weight: Tensor,
    out: Tensor,
    rounded: Tensor | None,
    planes: Planes | None,
    dtype: torch.dtype,
) -> None:
    who, (n_tokens, n_streams, width) = "hc_collapse_norm", streams.shape
    check_contiguous(who, streams=streams)
    check_tensor(who, "pre", pre, (n_tokens, n_streams), torch.float32)
    check_tensor(who, "weight", weight, (width,), torch.float32)
    check_tensor(who, "out", out, (n_tokens, width), torch.float32, dtype)
    if width % 32 and not (rounded is None and planes is None):
        raise ValueError(f"hc_collapse_norm: rows of {width} are no whole groups of 32")
    if rounded is not None:
        check_tensor(who, "rounded", rounded, (n_tokens, width), torch.float32, torch.bfloat16)
    if planes is not None:
        check_planes(who, "planes", planes, n_tokens, width)
