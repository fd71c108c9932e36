"""The best of many scores, exactly and always the same ones: what the selections are built from.

A score becomes a whole number, its key, that compares as the score does. One program finds the
best `wanted` of a slice: a search over the bits of the least key that is taken, then one scan that
takes what is above it and, of those equal to it, the first. More slices than one are narrowed:
each leaves its best, in order and without gaps, and the next launch takes them as its scores.
Invariants: nothing depends on the order in which programs run, and no sum is a float's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LEAST_SLICE, LARGEST_SLICE = 8192, 16384
ABSENT = tl.constexpr(-2147483648)  # below all keys
INFINITE = tl.constexpr(0x7F800000)  # the key of +inf
LOWEST = tl.constexpr(-2139095041)  # the key of -inf and of NaN


@triton.jit
def order_keys(x, BITS: tl.constexpr):
    """Return keys i32 of scores f32: NaN as -inf, zeros alike; 16 bits where x is bf16."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits == -2147483648, 0, bits)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, -8388608, bits)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> (32 - BITS)


@triton.jit
def take_best(keys, n_keys, wanted, BITS: tl.constexpr):
    """Choose the `wanted` best of n_keys keys i32 [N]; the others, at the end, are ABSENT.

    Higher keys first, then the lower index; `wanted` is at most n_keys. Returns whether each key is
    chosen, and its place among the chosen ones in order of index, which means nothing for others.
    """
    n_reached = tl.sum((keys >= 0).to(tl.int32), 0)
    least = tl.where(n_reached >= wanted, 0, ABSENT >> (32 - BITS))
    for step in range(tl.where(n_keys > wanted, BITS - 1, 0)):
        candidate = least + (1 << (BITS - 2 - step))
        n_reached = tl.sum((keys >= candidate).to(tl.int32), 0)
        least = tl.where(n_reached >= wanted, candidate, least)
    above = (keys > least).to(tl.int32)
    equal = (keys == least).to(tl.int32)
    missing = wanted - tl.sum(above, 0)
    counts = tl.cumsum(above + (equal << 16), 0)
    n_above, n_equal = counts & 0xFFFF, (counts >> 16) & 0xFFFF
    chosen = (above + equal * (n_equal <= missing).to(tl.int32)) != 0
    return chosen, n_above + tl.minimum(n_equal, missing) - 1


@triton.jit
def n_left(n, LEVEL: tl.constexpr, SLICE: tl.constexpr, TOP: tl.constexpr):
    """Return how many of n scores are left after LEVEL narrowings: full slices leave TOP each."""
    for _ in tl.static_range(LEVEL):
        n = n // SLICE * TOP + tl.minimum(n % SLICE, TOP)
    return n


@triton.jit
def leave_best(
    chosen, place, keys, ids, out_keys, out_ids, token, part, out_width, TOP: tl.constexpr
):
    """Write the chosen keys and what they belong to, for the next launch."""
    out = token.to(tl.int64) * out_width + part * TOP + place
    tl.store(out_keys + out, keys, mask=chosen)
    tl.store(out_ids + out, ids, mask=chosen)


@triton.jit
def narrow_kernel(
    first,
    keys,
    ids,
    out_keys,
    out_ids,
    n_rows,
    ratio,
    width,
    out_width,
    LEVEL: tl.constexpr,
    SIZE: tl.constexpr,
    TOP: tl.constexpr,
    SLICE: tl.constexpr,
    BITS: tl.constexpr,
):
    """Leave the best of each slice of what the launch before left; SIZE rows make one score."""
    part, token = tl.program_id(0), tl.program_id(1)
    n = tl.cdiv(visible_rows(first, token, ratio, n_rows), SIZE)
    n_here = tl.minimum(n_left(n, LEVEL, SLICE, TOP) - part * SLICE, SLICE)
    if (n > TOP) & (n_here > 0):
        key, name = load_left(keys, ids, token, part, width, n_here, SLICE)
        chosen, place = take_best(key, n_here, tl.minimum(n_here, TOP), BITS)
        leave_best(chosen, place, key, name, out_keys, out_ids, token, part, out_width, TOP)


@triton.jit
def load_left(keys, ids, token, part, width, n_here, SLICE: tl.constexpr):
    """Return the keys and ids [SLICE] that the launch before left in this slice."""
    at = tl.arange(0, SLICE)
    inside = at < n_here
    at = token.to(tl.int64) * width + part * SLICE + at
    key = tl.load(keys + at, mask=inside, other=ABSENT)
    return key, tl.load(ids + at, mask=inside, other=0)


@triton.jit
def visible_rows(first, token, ratio, n_rows):
    """Return how many compressed rows the step's token sees, i32."""
    return tl.minimum((tl.load(first) + token + 1) // ratio, n_rows).to(tl.int32)


@dataclass(frozen=True, slots=True)
class Narrowing:
    """How the best `top` of `n` are found: in how many launches, and in slices of which size."""

    n: int
    top: int
    slice: int
    widths: tuple[int, ...]  # of what each launch takes; the last one is no more than a slice

    @classmethod
    def plan(cls, n: int, top: int) -> Narrowing:
        """Return the launches for `n` scores; ValueError where `top` is too many."""
        if not 1 <= top <= LARGEST_SLICE // 2:
            raise ValueError(f"selection of the best {top}: at most {LARGEST_SLICE // 2}")
        most = min(max(LEAST_SLICE, 8 * triton.next_power_of_2(top)), LARGEST_SLICE)
        size = min(most, triton.next_power_of_2(max(n, top, 32)))
        widths = [n]
        while widths[-1] > size:
            widths.append(-(-widths[-1] // size) * top)
        return cls(n, top, size, tuple(widths))

    @property
    def n_warps(self) -> int:
        """Warps of a program: eight scores a lane, more in the largest slices."""
        return min(32, max(1, self.slice // 256))

    def parts(self, level: int) -> int:
        """Return the number of slices of a launch."""
        return triton.cdiv(self.widths[level], self.slice)  # type: ignore[no-any-return]

    def left(self, level: int, n_tokens: int, device: torch.device) -> torch.Tensor:
        """Return space for the keys and ids [2, T, width] that a launch leaves."""
        shape = (2, n_tokens, self.widths[level + 1])
        return torch.empty(shape, dtype=torch.int32, device=device)
