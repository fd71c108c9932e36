"""The router's decision for one token, as the experts' kernels and the host want it, in one launch.

One program holds all experts, a row of 128 a warp. Each row yields its own best in order; what the
rows yield is ranked by counting. Nothing here waits for the host, and all loads are asked for
before the first score is computed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import runs_kernels
from .early_launch import early, join_previous
from .libm import exp_powers, softplus_sqrt
from .reference import route_m1 as reference
from .reference.route_m1 import check_route, route_outputs
from .reference.route_select import SUM_FLOOR
from .tensor_checks import check_tensor

_ROW = 128  # experts that one warp ranks
_NO_KEY = tl.constexpr(-(2**31))  # taken, or no expert
_NAN_KEY = tl.constexpr(-(2**31) + 1)  # below minus infinity
_SUM_FLOOR = tl.constexpr(SUM_FLOOR)


@triton.jit
def _leaders(keys, expert, ROWS: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr,
             PADDED: tl.constexpr):  # fmt: skip
    """Return keys and experts [ROWS * PADDED] i32: the K best of each row of COLUMNS, and fill."""
    keys, expert = tl.reshape(keys, [ROWS, COLUMNS]), tl.reshape(expert, [ROWS, COLUMNS])
    turn = tl.arange(0, PADDED)[None, :]
    best_keys = tl.full([ROWS, PADDED], _NO_KEY, tl.int32)
    best = tl.full([ROWS, PADDED], ROWS * COLUMNS, tl.int32)
    for rank in tl.static_range(K):
        key = tl.max(keys, 1)
        lowest = tl.min(tl.where(keys == key[:, None], expert, ROWS * COLUMNS), 1)
        keys = tl.where(expert == lowest[:, None], _NO_KEY, keys)
        best_keys = tl.where(turn == rank, key[:, None], best_keys)
        best = tl.where(turn == rank, lowest[:, None], best)
    return tl.reshape(best_keys, [ROWS * PADDED]), tl.reshape(best, [ROWS * PADDED])


@triton.jit
def choose(logits, bias, powers, n_experts, routed_scale, ROWS: tl.constexpr,
           COLUMNS: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr):  # fmt: skip
    """Return what was picked, [ROWS * PADDED] each: whether, expert, weight, place in the plan."""
    expert = tl.arange(0, ROWS * COLUMNS)
    inside = expert < n_experts
    entries = tl.load(powers + tl.arange(0, 32))
    logit = tl.load(logits + expert, mask=inside, other=0.0)
    offset = tl.load(bias + expert, mask=inside, other=0.0)
    scores = softplus_sqrt(logit, entries)
    ranked = scores + offset + 0.0  # no negative zero
    bits = ranked.to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = tl.where(ranked == ranked, keys, _NAN_KEY)  # noqa: PLR0124
    keys = tl.where(inside, keys, _NO_KEY)
    keys, best = _leaders(keys, expert, ROWS, COLUMNS, K, PADDED)
    before = keys[None, :] > keys[:, None]
    before |= (keys[None, :] == keys[:, None]) & (best[None, :] < best[:, None])
    rank = tl.sum(before.to(tl.int32), 1)
    picked = (rank < K) & (keys != _NO_KEY)
    # what is not picked stands behind all experts
    order = tl.where(picked, best, ROWS * COLUMNS)
    place = tl.sum((order[None, :] < order[:, None]).to(tl.int32), 1)
    score = tl.gather(scores, tl.where(picked, best, 0), 0)
    total = tl.sum(tl.where(picked & (rank == 0), score, 0.0), 0)
    for turn in tl.static_range(1, K):  # in order of rank: the order decides bits
        total += tl.sum(tl.where(picked & (rank == turn), score, 0.0), 0)
    weight = tl.div_rn(score, tl.zeros_like(score) + (total + _SUM_FLOOR)) * routed_scale
    return picked, best, weight, place


@triton.jit
def _route_m1_kernel(
    logits,
    bias,
    powers,
    table,
    addresses,
    header,
    pointers,
    weights,
    n_experts,
    n_slots,
    routed_scale,
    gate_offset,
    up_offset,
    down_offset,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    K: tl.constexpr,
    PADDED: tl.constexpr,
    EARLY: tl.constexpr,
):
    join_previous(EARLY)
    expert = tl.arange(0, ROWS * COLUMNS)
    slots = tl.load(table + expert, mask=expert < n_experts, other=-1)
    here = (slots >= 0) & (slots < n_slots)
    slots = tl.where(here, slots, -1)
    bases = tl.load(addresses + slots, mask=here, other=0)
    picked, best, weight, place = choose(
        logits, bias, powers, n_experts, routed_scale, ROWS, COLUMNS, K, PADDED
    )
    within = tl.where(picked, best, 0)
    slot, base = tl.gather(slots, within, 0), tl.gather(bases, within, 0)
    absent = slot < 0
    tl.store(header, tl.sum((picked & absent).to(tl.int32), 0))
    at = header + 1 + place
    tl.store(at, best, mask=picked)
    tl.store(at + K, weight.to(tl.int32, bitcast=True), mask=picked)
    tl.store(at + 2 * K, slot, mask=picked)
    tl.store(weights + place, weight, mask=picked)
    at = pointers + place
    tl.store(at, tl.where(absent, 0, base + gate_offset), mask=picked)
    tl.store(at + K, tl.where(absent, 0, base + up_offset), mask=picked)
    tl.store(at + 2 * K, tl.where(absent, 0, base + down_offset), mask=picked)


@triton.jit
def _route_rows_kernel(
    logits,
    bias,
    powers,
    picks,
    weights,
    n_experts,
    routed_scale,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    K: tl.constexpr,
    PADDED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    picked, best, weight, place = choose(
        logits + token * n_experts, bias, powers, n_experts, routed_scale,
        ROWS, COLUMNS, K, PADDED,
    )  # fmt: skip
    at = token * K + place
    tl.store(picks + at, best, mask=picked)
    tl.store(weights + at, weight, mask=picked)


def _shape(n_experts: int, top_k: int) -> dict[str, int | bool]:
    """Return how the kernels are launched."""
    padded = max(triton.next_power_of_2(n_experts), 32)
    columns = min(padded, _ROW)
    return {
        "ROWS": padded // columns,
        "COLUMNS": columns,
        "K": top_k,
        "PADDED": triton.next_power_of_2(top_k),
        "num_warps": padded // columns,
        "enable_fp_fusion": False,  # libm.log1pf wants it
    }


def route_m1(
    logits: Tensor,
    bias: Tensor,
    table: Tensor,
    addresses: Tensor,
    piece_offsets: tuple[int, int, int],
    *,
    top_k: int,
    routed_scale: float,
    header: Tensor | None = None,
    pointers: Tensor | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Pick one token's experts, weigh them, and look up where they lie.

    logits         [1, E] f32, contiguous; E up to 1,024
    bias           [E] f32
    table          [E] i32, the layer's row of the slot table: a slot, or -1
    addresses      [n_slots] i64, where each slot begins
    piece_offsets  where gate, up and down begin in a slot, bytes
    top_k          K, up to 16
    returns        header [1 + 3K] i32, pointers [3, K] i64, weights [K] f32, in the tensors given
                   or new ones

    In plan order, ascending by expert: the header holds how many picks are absent, then the picks,
    the bits of their weights, and their slots, -1 for an absent one; pointers are the addresses of
    gate, up and down, 0 for an absent one. A slot that is not in `addresses` counts as absent.
    Picks and weights are those of `reference.route_select`, bit for bit but for the payload of a
    NaN. One launch of one program; capturable. Raises ValueError on shapes and dtypes that differ
    and beyond the limits.
    """
    check_route("route_m1", logits, bias, top_k)
    if logits.shape[0] != 1:
        raise ValueError(f"route_m1: {logits.shape[0]} rows of logits, wanted 1")
    header, pointers, weights = route_outputs(
        table, addresses, logits, top_k, header, pointers, weights
    )
    if not runs_kernels(logits):
        return reference.route_m1(
            logits, bias, table, addresses, piece_offsets,
            top_k=top_k, routed_scale=routed_scale,
            header=header, pointers=pointers, weights=weights,
        )  # fmt: skip
    n_experts = logits.shape[1]
    _route_m1_kernel[(1,)](
        logits, bias, exp_powers(logits.device), table, addresses, header, pointers, weights,
        n_experts, addresses.shape[0], float(routed_scale), *piece_offsets,
        **_shape(n_experts, top_k), **early(logits.device),
    )  # fmt: skip
    return header, pointers, weights


def route_rows(
    logits: Tensor,
    bias: Tensor,
    *,
    top_k: int,
    routed_scale: float,
    picks: Tensor | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Pick and weigh the experts of each of T tokens.

    logits   [T, E] f32, contiguous; E up to 1,024
    bias     [E] f32
    top_k    K, up to 16
    returns  picks [T, K] i32 in plan order, ascending by expert, and weights [T, K] f32 beside
             them, in the tensors given or new ones

    Picks and weights are those of `reference.route_select`, bit for bit but for the payload of a
    NaN; a token's do not depend on the others. Raises ValueError as `route_m1` does.
    """
    check_route("route_rows", logits, bias, top_k)
    n_tokens, n_experts = logits.shape
    if picks is None:
        picks = torch.empty((n_tokens, top_k), dtype=torch.int32, device=logits.device)
    if weights is None:
        weights = torch.empty((n_tokens, top_k), dtype=torch.float32, device=logits.device)
    for name, out, dtype in (("picks", picks, torch.int32), ("weights", weights, torch.float32)):
        check_tensor("route_rows", name, out, (n_tokens, top_k), dtype)
    if not runs_kernels(logits):
        return reference.route_rows(
            logits, bias, top_k=top_k, routed_scale=routed_scale, picks=picks, weights=weights
        )
    if n_tokens:
        _route_rows_kernel[(n_tokens,)](
            logits, bias, exp_powers(logits.device), picks, weights, n_experts,
            float(routed_scale), **_shape(n_experts, top_k),
        )  # fmt: skip
    return picks, weights
