"""The index keys of the groups that close within a step, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bf16_bits import round_to_bf16
from .device import runs_kernels
from .fp4_groups import round_groups_to_fp4_index
from .reference import index_keys as reference
from .tensor_checks import check_rows, check_tensor
from .turn_tail import turn_tail


@triton.jit
def _index_keys_kernel(
    projected,
    first,
    norm,
    turns,
    keys,
    n_tokens,
    n_keys,
    ratio,
    width,
    n_turned,
    stride,
    eps,
    BLOCK: tl.constexpr,
    BF16: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    index = tl.program_id(0)
    begin = tl.load(first)
    group = begin // ratio + index
    if (group * ratio + ratio <= begin + n_tokens) & (group < n_keys):
        at = tl.arange(0, BLOCK)
        inside = at < width
        row = tl.load(projected + index * stride + at, mask=inside, other=0.0)
        if BF16:
            row = round_to_bf16(row)
        inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(row * row, 0), width * 1.0) + eps))
        row = tl.load(norm + at, mask=inside, other=0.0) * (row * inverse)
        if BF16:
            row = round_to_bf16(row)
        row = tl.reshape(row, [1, BLOCK])
        row = turn_tail(row, turns + group * ratio * n_turned, width, n_turned, 1, BLOCK)
        if BF16:
            row = round_to_bf16(row)
        if ROUNDS:
            row = round_groups_to_fp4_index(tl.reshape(row, [BLOCK // 32, 32]))
        tl.store(keys + group * width + at, tl.reshape(row, [BLOCK]), mask=inside)


def index_keys(
    projected: Tensor,
    first: Tensor,
    n_tokens: int,
    ratio: int,
    norm: Tensor,
    turns: Tensor,
    keys: Tensor,
    eps: float,
    *,
    dtype: torch.dtype,
    rounds: bool,
) -> None:
    """Norm, turn and round the projected latents, and write them to `keys`.

    projected  [N, k] f32, rows contiguous: row i is of group first // ratio + i; rows of groups
               that do not close within the step are not read
    first      [1] i64, the position of the step's first token of `n_tokens`
    norm       [k] f32, contiguous
    turns      [P, r / 2, 2] f32, P > the last position; a key is turned at its group's first one
    keys       [G, k] `dtype`: row g is written for each group g that closes within the step
    rounds     whether keys are rounded to fp4

    Raises ValueError on a shape or dtype that differs. Within 2e-6 (relative, f32) of the reference
    before its casts; in bf16 a value on a rounding tie may move by one ulp, and after the rounding
    by one step of its grid. Source: model specification, sections 3.5 and 2.2.
    """
    width = keys.shape[1]
    if projected.dtype != torch.float32 or projected.shape[1] != width or width % 32:
        raise ValueError(
            f"index_keys: projected is {projected.dtype} {tuple(projected.shape)}, "
            f"wanted f32 [N, {width}]"
        )
    check_rows("index_keys", projected=projected)
    check_tensor("index_keys", "norm", norm, (width,), torch.float32)
    check_tensor("index_keys", "turns", turns, tuple(turns.shape), torch.float32)
    check_tensor("index_keys", "keys", keys, (len(keys), width), dtype)
    if len(projected) < n_tokens // ratio + (ratio > 1):
        raise ValueError(f"index_keys: {len(projected)} rows for {n_tokens} tokens")
    if not runs_kernels(projected):
        reference.index_keys(
            projected, first, n_tokens, ratio, norm, turns, keys, eps, dtype=dtype, rounds=rounds
        )
    elif n_tokens:
        block = triton.next_power_of_2(width)
        _index_keys_kernel[(n_tokens // ratio + (ratio > 1),)](
            projected, first, norm, turns, keys, n_tokens, len(keys), ratio, width,
            2 * turns.shape[1], projected.stride(0), eps, BLOCK=block,
            BF16=dtype == torch.bfloat16, ROUNDS=rounds, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
