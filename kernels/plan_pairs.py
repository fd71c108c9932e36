"""A chunk's picks as pairs of token and expert, sorted by expert, then token, in one launch.

One program an expert: it counts the picks that come before its own, then places its own in their
order. Nothing depends on the order in which programs run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import runs_kernels
from .reference import plan_pairs as reference
from .tensor_checks import check_contiguous

_BLOCK = 2048


@triton.jit
def _plan_pairs_kernel(
    picks, weights, tokens, sorted_weights, places, counts, n_pairs,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    before = tl.zeros([BLOCK], tl.int32)
    own = tl.zeros([BLOCK], tl.int32)
    for start in range(0, n_pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        pick = tl.load(picks + pair, mask=pair < n_pairs, other=0x7FFFFFFF)
        before += (pick < expert).to(tl.int32)
        own += (pick == expert).to(tl.int32)
    place, count = tl.sum(before, 0), tl.sum(own, 0)
    tl.store(counts + expert, count)
    for start in range(0, tl.where(count > 0, n_pairs, 0), BLOCK):
        pair = start + tl.arange(0, BLOCK)
        mine = tl.load(picks + pair, mask=pair < n_pairs, other=0x7FFFFFFF) == expert
        ones = mine.to(tl.int32)
        at = place + tl.cumsum(ones, 0) - 1
        tl.store(tokens + at, pair // TOP_K, mask=mine)
        tl.store(sorted_weights + at, tl.load(weights + pair, mask=mine, other=0.0), mask=mine)
        tl.store(places + pair, at, mask=mine)
        place += tl.sum(ones, 0)


def plan_pairs(
    picks: Tensor, weights: Tensor, n_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort the pairs of token and expert by expert, then token.

    picks    [T, K] i32, contiguous, from 0 to n_experts - 1, no expert twice in a row
    weights  [T, K] f32, contiguous
    returns  tokens [T * K] i32 and weights [T * K] f32 of the pairs, places [T, K] i32 of each
             token's pairs among them, counts [n_experts] i32 of each expert's pairs

    Raises ValueError on a shape or dtype that differs. Equals `reference.plan_pairs`.
    """
    shape = tuple(picks.shape)
    fits = picks.dim() == 2 and picks.dtype == torch.int32 and weights.dtype == torch.float32
    if not fits or tuple(weights.shape) != shape:
        raise ValueError(
            f"plan_pairs: picks {picks.dtype} {shape}, weights {weights.dtype} "
            f"{tuple(weights.shape)}, wanted int32 and f32 [T, K]"
        )
    check_contiguous("plan_pairs", picks=picks, weights=weights)
    if not runs_kernels(picks):
        return reference.plan_pairs(picks, weights, n_experts)
    tokens, places = torch.empty_like(picks).view(-1), torch.empty_like(picks)
    sorted_weights = torch.empty_like(weights).view(-1)
    counts = torch.empty(n_experts, dtype=torch.int32, device=picks.device)
    if n_experts:
        _plan_pairs_kernel[(n_experts,)](
            picks, weights, tokens, sorted_weights, places, counts, picks.numel(),
            TOP_K=shape[1], BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
    return tokens, sorted_weights, places, counts
