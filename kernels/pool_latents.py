"""The groups of a kv source that close within a step, in one launch.

One program makes one group's row. The program of the first group alone reads and writes the state
of the open group, in this order, so no program reads what another one overwrites.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bf16_bits import round_to_bf16
from .device import runs_kernels
from .fp4_groups import round_groups_to_fp4_latent
from .reference import pool_latents as reference
from .tensor_checks import check_rows, check_tensor
from .turn_tail import turn_tail


@triton.jit
def _members(projected, state, begin, position, n_slots, stride, at, width, inside):
    # Tokens of this step, or those before it that the open state keeps.
    token = position - begin
    new = inside & (token >= 0)
    value = tl.load(projected + token * stride + at, mask=new, other=0.0)
    old = tl.load(state + position % n_slots * width + at, mask=inside & (token < 0), other=0.0)
    return tl.where(new, value, old)


@triton.jit
def _keep(projected, state, begin, n_tokens, n_slots, stride, at, width):
    # Of the positions that share a slot, the last one of the step stays.
    last = begin + n_tokens - 1
    for slot in range(n_slots):
        token = n_tokens - 1 - (last - slot + n_slots) % n_slots
        mine = at < tl.where(token >= 0, width, 0)
        value = tl.load(projected + token * stride + at, mask=mine, other=0.0)
        tl.store(state + slot * width + at, value, mask=mine)


@triton.jit
def _pool_latents_kernel(
    projected,
    first,
    open_kv,
    open_scores,
    norm,
    turns,
    rows,
    latent,
    n_tokens,
    n_slots,
    n_rows,
    width,
    n_turned,
    stride,
    eps,
    RATIO: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK: tl.constexpr,
    BF16: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    index = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < width
    begin = tl.load(first)
    group = begin // RATIO + index
    position = group * RATIO
    closes = position + RATIO <= begin + n_tokens
    held = at < tl.where(closes, width, 0)
    if RATIO == 1:
        row = tl.load(projected + index * stride + at, mask=held, other=0.0)
    else:
        member = tl.arange(0, MEMBERS)[:, None]
        each = held[None, :] & (member < RATIO)
        score = _members(
            projected + width, open_scores, begin, position + member, n_slots, stride, at[None, :],
            width, each,
        )  # fmt: skip
        score = tl.where(member < RATIO, score, -float("inf"))
        kv = _members(
            projected, open_kv, begin, position + member, n_slots, stride, at[None, :], width, each
        )
        score = tl.exp(score - tl.max(score, 0)[None, :])
        total = tl.broadcast_to(tl.sum(score, 0)[None, :], score.shape)
        row = tl.sum(tl.div_rn(score, total) * kv, 0)
        row = tl.where(held, row, 0.0)
        tl.debug_barrier()  # the state was read by all
        if index == 0:
            _keep(projected, open_kv, begin, n_tokens, n_slots, stride, at, width)
            _keep(projected + width, open_scores, begin, n_tokens, n_slots, stride, at, width)
    if BF16:
        row = round_to_bf16(row)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(row * row, 0), width * 1.0) + eps))
    row = tl.load(norm + at, mask=inside, other=0.0) * (row * inverse)
    if BF16:
        row = round_to_bf16(row)
    tl.store(latent + index * width + at, tl.where(held, row, 0.0), mask=inside)
    if closes & (group < n_rows):
        turned = turn_tail(
            tl.reshape(row, [1, BLOCK]), turns + position * n_turned, width, n_turned, 1, BLOCK
        )
        turned = tl.reshape(turned, [BLOCK])
        if BF16:
            turned = round_to_bf16(turned)
        if ROUNDS:
            rounded = round_groups_to_fp4_latent(tl.reshape(turned, [BLOCK // 16, 16]))
            turned = tl.reshape(rounded, [BLOCK])
        tl.store(rows + group * width + at, turned, mask=inside)


def pool_latents(
    projected: Tensor,
    first: Tensor,
    ratio: int,
    open_kv: Tensor | None,
    open_scores: Tensor | None,
    norm: Tensor,
    turns: Tensor,
    rows: Tensor,
    eps: float,
    *,
    dtype: torch.dtype,
    rounds: bool,
    latent: Tensor | None = None,
) -> Tensor:
    """Pool tokens into groups; write the open state, latents and compressed rows.

    projected    [T, 2 * k] f32, values then scores, rows contiguous; [T, k] values for ratio 1
    first        [1] i64, the position of row 0
    open_kv      [S, k] f32, S >= ratio: what the tokens of open groups left at slot position % S;
                 None for ratio 1
    open_scores  [S, k] f32, the same
    norm         [k] f32, contiguous
    turns        [P, r / 2, 2] f32, P > the last position
    rows         [G, k] `dtype`: row g is written for each group g that closes within the step
    rounds       whether compressed rows are rounded to fp4
    returns      [T // ratio + 1, k] f32 ([T, k] for ratio 1), in `latent` where given: row i is the
                 latent of group first // ratio + i, exact in `dtype`; zeros where it stays open

    A step may run again with the same bytes as long as it overwrote nothing that it read: for any
    first where S >= T + ratio - 1, which one token always meets.
    Raises ValueError on a shape or dtype that differs. Within 2e-6 (relative, f32) of the reference
    before the cast; in bf16 a value on a rounding tie may move by one ulp, and in a compressed row
    by one step of its grid. Source: model specification, sections 3.4 and 2.2.
    """
    n_tokens, width = len(projected), rows.shape[1]
    latent = _checked(projected, ratio, open_kv, open_scores, rows, dtype, latent)
    check_tensor("pool_latents", "norm", norm, (width,), torch.float32)
    check_tensor("pool_latents", "turns", turns, tuple(turns.shape), torch.float32)
    if not runs_kernels(projected):
        return reference.pool_latents(
            projected, first, ratio, open_kv, open_scores, norm, turns, rows, eps,
            dtype=dtype, rounds=rounds, latent=latent,
        )  # fmt: skip
    if n_tokens:
        block = triton.next_power_of_2(max(width, 16))
        slots = 1 if open_kv is None else len(open_kv)
        stand_in = projected
        _pool_latents_kernel[(len(latent),)](
            projected, first, stand_in if open_kv is None else open_kv,
            stand_in if open_scores is None else open_scores, norm, turns, rows, latent,
            n_tokens, slots, len(rows), width, 2 * turns.shape[1], projected.stride(0), eps,
            RATIO=ratio, MEMBERS=triton.next_power_of_2(ratio), BLOCK=block,
            BF16=dtype == torch.bfloat16, ROUNDS=rounds,
            num_warps=max(1, min(4, block // 128)), enable_fp_fusion=False,
        )  # fmt: skip
    return latent


def _checked(
    projected: Tensor,
    ratio: int,
    open_kv: Tensor | None,
    open_scores: Tensor | None,
    rows: Tensor,
    dtype: torch.dtype,
    latent: Tensor | None,
) -> Tensor:
    n_tokens, width = len(projected), rows.shape[1]
    columns = width if ratio == 1 else 2 * width
    if projected.dtype != torch.float32 or projected.shape[1] != columns or width % 16:
        raise ValueError(
            f"pool_latents: projected is {projected.dtype} {tuple(projected.shape)}, "
            f"wanted f32 [T, {columns}] for ratio {ratio} and rows of {width}"
        )
    check_rows("pool_latents", projected=projected)
    check_tensor("pool_latents", "rows", rows, (len(rows), width), dtype)
    states = {"open_kv": open_kv, "open_scores": open_scores} if ratio > 1 else {}
    for name, state in states.items():
        if state is None or state.shape[1] != width or len(state) < ratio:
            raise ValueError(f"pool_latents: the open state has {ratio} slots of {width} or more")
        check_tensor("pool_latents", name, state, (len(state), width), torch.float32)
    wanted = (n_tokens if ratio == 1 else n_tokens // ratio + 1, width)
    if latent is None:
        latent = torch.empty(wanted, dtype=torch.float32, device=projected.device)
    check_tensor("pool_latents", "latent", latent, wanted, torch.float32)
    return latent
