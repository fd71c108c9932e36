"""From the first projection of attention: the query latent, and the window row in its ring.

Invariants: both are addressed by absolute position and depend on inputs alone; a row's bits do not
depend on how many rows a step has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bf16_bits import round_to_bf16
from .device import runs_kernels
from .early_launch import early, join_previous
from .reference import norm_latents as reference
from .round_fp8 import GROUP, round_groups_to_fp8
from .tensor_checks import check_contiguous, check_rows, check_tensor
from .turn_pairs import turn_pairs


@triton.jit
def _normed(x, weight, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BF16: tl.constexpr):
    """Return the RMS norm [1, BLOCK] of one row, rounded to the activation dtype."""
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    row = tl.load(x + at, mask=inside, other=0.0)
    if BF16:
        row = round_to_bf16(row)
    inverse = tl.rsqrt(tl.sum(row * row, 0) / WIDTH + eps)
    row = tl.load(weight + at, mask=inside, other=0.0) * (row * inverse)
    if BF16:
        row = round_to_bf16(row)
    return row[None, :]


@triton.jit
def _store(out, row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    if ROUNDS:
        row = round_groups_to_fp8(tl.reshape(row, [BLOCK // 32, 32]))
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.reshape(row, [BLOCK]), mask=at < WIDTH)


@triton.jit
def _norm_latents_kernel(
    projected,
    q_norm,
    kv_norm,
    first,
    turns,
    qr,
    ring,
    stride,
    n_slots,
    eps,
    Q: tl.constexpr,
    K: tl.constexpr,
    TURNED: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    BF16: tl.constexpr,
    ROUNDS: tl.constexpr,
    EARLY: tl.constexpr,
):
    join_previous(EARLY)
    token = tl.program_id(1)
    row = projected + token * stride
    if tl.program_id(0) == 0:
        q = _normed(row, q_norm, eps, Q, Q_BLOCK, BF16)
        _store(qr + token * Q, q, Q, Q_BLOCK, ROUNDS)
    else:
        position = tl.load(first) + token
        kv = _normed(row + Q, kv_norm, eps, K, K_BLOCK, BF16)
        kv = turn_pairs(kv, turns + position * TURNED, 0, K - TURNED, TURNED, False)
        if BF16:
            kv = round_to_bf16(kv)
        _store(ring + (position % n_slots) * K, kv, K, K_BLOCK, ROUNDS)


def norm_latents(
    projected: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    first: Tensor,
    turns: Tensor,
    eps: float,
    *,
    dtype: torch.dtype,
    rounds: bool,
    ring: Tensor,
    qr: Tensor | None = None,
) -> Tensor:
    """Norm both parts of each row; the window row of position p goes to ring slot p mod W.

    projected  [T, q + k] f32, rows contiguous; rounded to `dtype` before anything else
    q_norm     [q] f32, contiguous; kv_norm [k] f32, contiguous
    first      [1] int64 on the device, position of row 0
    turns      [P, r / 2, 2] f32, (cos, sin) by position, P >= first + T
    dtype      of activations: bf16 or f32
    rounds     whether both results are rounded to fp8 per 32 channels (q and k multiples of 32)
    ring       [W, k] `dtype`, T <= W, written
    returns    [T, q] f32, exact in `dtype`, in `qr` where given, which may be `dtype` as well

    Raises ValueError on a shape or dtype that differs. Within 2e-6 (relative to the row's norm) of
    `reference.norm_latents` in f32 unrounded; in bf16 a value on a tie may move by one ulp, and
    then by one step of its fp8 grid. Source: model specification, section 3.3, steps 1 and 2.
    """
    n_tokens, width, k = projected.shape[0], len(q_norm), len(kv_norm)
    qr = _checked(projected, q_norm, kv_norm, first, turns, dtype, rounds, ring, qr)
    if not runs_kernels(projected):
        return qr.copy_(
            reference.norm_latents(
                projected, q_norm, kv_norm, first, turns, eps, dtype=dtype, rounds=rounds, ring=ring
            )
        )
    if n_tokens:
        q_block = max(GROUP, triton.next_power_of_2(width))
        k_block = max(GROUP, triton.next_power_of_2(k))
        _norm_latents_kernel[(2, n_tokens)](
            projected, q_norm, kv_norm, first, turns, qr, ring, projected.stride(0), len(ring), eps,
            Q=width, K=k, TURNED=2 * turns.shape[1], Q_BLOCK=q_block, K_BLOCK=k_block,
            BF16=dtype == torch.bfloat16, ROUNDS=rounds, num_warps=4, **early(projected.device),
        )  # fmt: skip
    return qr


def _checked(
    projected: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    first: Tensor,
    turns: Tensor,
    dtype: torch.dtype,
    rounds: bool,
    ring: Tensor,
    qr: Tensor | None,
) -> Tensor:
    """Raise ValueError unless everything fits; return the tensor for the query latents."""
    n_tokens, width, k = projected.shape[0], len(q_norm), len(kv_norm)
    if projected.dtype != torch.float32 or projected.dim() != 2:
        raise ValueError(f"norm_latents: projected is {projected.dtype}, wanted f32 rows")
    if projected.shape[1] != width + k or (rounds and (width % GROUP or k % GROUP)):
        raise ValueError(f"norm_latents: {projected.shape[1]} columns for norms of {width} and {k}")
    if dtype not in {torch.bfloat16, torch.float32} or ring.dtype != dtype:
        raise ValueError(f"norm_latents: the ring is {ring.dtype}, activations are {dtype}")
    if ring.dim() != 2 or ring.shape[1] != k or len(ring) < n_tokens:
        raise ValueError(f"norm_latents: ring {tuple(ring.shape)} for {n_tokens} rows of {k}")
    check_rows("norm_latents", projected=projected)
    check_tensor("norm_latents", "q_norm", q_norm, (width,), torch.float32)
    check_tensor("norm_latents", "kv_norm", kv_norm, (k,), torch.float32)
    check_positions("norm_latents", first, turns, k)
    if qr is None:
        qr = torch.empty((n_tokens, width), dtype=torch.float32, device=projected.device)
    check_tensor("norm_latents", "qr", qr, (n_tokens, width), torch.float32, dtype)
    check_contiguous("norm_latents", ring=ring)
    return qr


def check_positions(who: str, first: Tensor, turns: Tensor, k: int) -> None:
    """Raise ValueError unless first is one int64 and turns [P, r / 2, 2] f32 for rows of k."""
    if first.dtype != torch.int64 or first.numel() != 1:
        raise ValueError(f"{who}: first is {first.dtype} {tuple(first.shape)}, wanted int64 [1]")
    fits = turns.dim() == 3 and turns.shape[2] == 2 and 2 * turns.shape[1] <= k and k % 2 == 0
    if turns.dtype != torch.float32 or not fits:
        raise ValueError(f"{who}: turns are {turns.dtype} {tuple(turns.shape)} for rows of {k}")
    check_contiguous(who, turns=turns)
