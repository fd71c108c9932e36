"""The launches of a draw from the likeliest ids alone, as top_k and top_p leave them.

Three launches: all ids are weighed, and counted in bins of like weight; the ids of the heaviest
bins, as many as surely hold what top_k and top_p leave, are gathered in ascending order; and one
program finds the least logit that is kept, the last kept id of that logit, and draws. Nothing is
sorted, and no number of ids is too many: the last launch takes them in as many chunks as there are.
Invariants: an id's weight grows with its logit, so the ids of the heaviest bins are the likeliest;
what is read of the filters is read on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .draw_searches import ALL, cut, kept_weights, sum_of
from .id_weights import load_weights, share_of, store_id
from .libm import exp_powers
from .top_keys import order_keys

_BLOCK = 1024
_CHUNK = 1024
_CHUNK_WARPS = 16
_BINS = 64  # the last one is of ids that weigh nothing
_TOP = tl.constexpr((127 + 40) << 23)  # the bits of 2^40
_WIDTH = tl.constexpr((40 << 23) // 63 + 1)  # of a bin, in bits of f32: 63 go down to 1


@triton.jit
def _bins_of(weights, BINS: tl.constexpr):
    """Return the bin of each weight: 0 is the heaviest. A weight is exact in f32."""
    bits = weights.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.minimum(-(bits - _TOP) // _WIDTH, BINS - 1)


@triton.jit
def _weigh_kernel(
    logits, likeliest, numbers, powers, weights, sums, counts, n,
    BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    at = part * BLOCK + tl.arange(0, BLOCK)
    weight, _ = load_weights(logits, at, n, likeliest, numbers, powers)
    tl.store(weights + at, weight, mask=at < n)
    tl.store(sums + part, tl.sum(weight, 0))
    counted = tl.histogram(_bins_of(weight, BINS), BINS)
    tl.store(counts + part * BINS + tl.arange(0, BINS), counted)


@triton.jit
def _last_bin(found, sums, numbers, n_parts, PARTS: tl.constexpr, BINS: tl.constexpr):
    """Return the bin up to which ids may be kept; found [PARTS, BINS] are the counts."""
    bins = tl.arange(0, BINS)
    counts = tl.where(bins < BINS - 1, tl.sum(found, 0), 0)
    parts = tl.arange(0, PARTS)
    total = tl.sum(tl.load(sums + parts, mask=parts < n_parts, other=0), 0)
    top_k, share = tl.load(numbers + 1), tl.load(numbers + 2)
    # What lies behind a bin weighs less than top_p may leave, if it does at its bins' upper edges.
    edges = (bins * -_WIDTH + _TOP).to(tl.float32, bitcast=True).to(tl.int64)
    most = counts.to(tl.int64) * edges
    behind = tl.sum(most, 0) - tl.cumsum(most, 0)
    light = (share != 0) & (behind <= total - tl.maximum(share_of(total, share), 1))
    enough = tl.where(top_k > 0, tl.cumsum(counts, 0) >= top_k, light)
    return tl.min(tl.where(enough, bins, BINS - 2), 0)


@triton.jit
def _gather_kernel(
    logits, weights, sums, counts, numbers, ids, keys, left, n_left, n_parts, n,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    parts, bins = tl.arange(0, PARTS)[:, None], tl.arange(0, BINS)[None, :]
    found = tl.load(counts + parts * BINS + bins, mask=parts < n_parts, other=0)
    last = _last_bin(found, sums, numbers, n_parts, PARTS, BINS)
    n_taken = tl.sum(tl.where(bins <= last, found, 0), 1)
    parts = tl.arange(0, PARTS)
    if part == 0:
        tl.store(n_left, tl.sum(n_taken, 0))
    before = tl.sum(tl.where(parts < part, n_taken, 0), 0)
    at = part * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    weight = tl.load(weights + at, mask=inside, other=0)
    taken = _bins_of(weight, BINS) <= last
    place = before + tl.cumsum(taken.to(tl.int32), 0) - 1
    key = order_keys(tl.load(logits + at, mask=inside, other=0.0), 32)
    tl.store(ids + place, at, mask=taken)
    tl.store(keys + place, key, mask=taken)
    tl.store(left + place, weight, mask=taken)


@triton.jit(do_not_specialize=["n"])  # a 1 would be a constant: loops change what begins with it
def _draw_best_kernel(
    ids, keys, left, n_left, sums, numbers, likeliest, out, n_parts, n,
    PARTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    n_here = tl.load(n_left)
    top_k, share = tl.load(numbers + 1), tl.load(numbers + 2)
    least, word = tl.load(numbers + 3), tl.load(numbers + 4)
    parts = tl.arange(0, PARTS)
    total = tl.sum(tl.load(sums + parts, mask=parts < n_parts, other=0), 0)
    key, end = tl.full([], ALL, tl.int64), n
    if top_k > 0:
        goal = tl.minimum(top_k, n_here.to(tl.int64))
        key, end = cut(ids, keys, left, n_here, n, goal, True, CHUNK)
        total = sum_of(ids, keys, left, n_here, key, end, 0, False, CHUNK)
    if share != 0:
        goal = tl.maximum(share_of(total, share), 1)
        key, end = cut(ids, keys, left, n_here, n, goal, False, CHUNK)
    point = share_of(sum_of(ids, keys, left, n_here, key, end, least, False, CHUNK), word)
    place, before = tl.full([], 0, tl.int32), tl.full([], 0, tl.int64)
    for start in range(0, n_here, CHUNK):
        kept = kept_weights(ids, keys, left, start, n_here, key, end, least, False, CHUNK)
        passed = (before + tl.cumsum(kept, 0) <= point) & (start + tl.arange(0, CHUNK) < n_here)
        place += tl.sum(passed.to(tl.int32), 0)
        before += tl.sum(kept, 0)
    place = tl.maximum(tl.minimum(place, n_here - 1), 0)
    store_id(out, tl.load(ids + place).to(tl.int64), likeliest)


def draw_best(logits: Tensor, likeliest: Tensor, numbers: Tensor, out: Tensor) -> None:
    """Launch a draw with top_k and top_p; arguments are `draw`'s, and were looked at."""
    n, device, powers = logits.shape[0], logits.device, exp_powers(logits.device)
    n_parts = triton.cdiv(n, _BLOCK)
    weights, left = torch.empty((2, n), dtype=torch.int64, device=device)
    sums = torch.empty(n_parts, dtype=torch.int64, device=device)
    counts = torch.empty((n_parts, _BINS), dtype=torch.int32, device=device)
    ids, keys = torch.empty((2, n), dtype=torch.int32, device=device)
    n_left = torch.empty(1, dtype=torch.int32, device=device)
    parts = triton.next_power_of_2(n_parts)
    _weigh_kernel[(n_parts,)](
        logits, likeliest, numbers, powers, weights, sums, counts, n, BLOCK=_BLOCK, BINS=_BINS
    )
    _gather_kernel[(n_parts,)](
        logits, weights, sums, counts, numbers, ids, keys, left, n_left, n_parts, n,
        PARTS=parts, BLOCK=_BLOCK, BINS=_BINS, num_warps=8,
    )  # fmt: skip
    _draw_best_kernel[(1,)](
        ids, keys, left, n_left, sums, numbers, likeliest, out, n_parts, n,
        PARTS=parts, CHUNK=_CHUNK, num_warps=_CHUNK_WARPS,
    )  # fmt: skip
