"""Search for the scales and minima of a block whose groups are `d * s * q - d_min * m`.

First every group alone: several ranges, each rounded and refitted by least squares, the best one
refined by turns of rounding and refitting. Then the block: its groups' scales and minima become
small integers of a common `d` and `d_min`; each group tries the neighbouring integers, and `d` and
`d_min` are refitted by least squares over the whole block. Every choice is by squared error.

Layout inside: values [group_values, n_groups, n_blocks], so that sums run over the slowest
dimension. Invariants: sums are `fold`s and no step reads another block, so a block's result depends
on its own values alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .block import apart, divide, fold, round_f16


@dataclass(frozen=True, slots=True)
class AffineGrid:
    """What an affine format can express, and how far the search goes."""

    n_groups: int  # groups in a block
    top: int  # largest q
    sub_top: int  # largest s and largest m
    shrinks: tuple[tuple[float, float], ...]  # parts of a group's range cut off below and above
    rounds: int  # refits of the whole block


@dataclass(frozen=True, slots=True)
class AffineFit:
    """The numbers to store, one row a block; d and d_min are float16 values."""

    d: Tensor  # [n_blocks] f32
    d_min: Tensor  # [n_blocks] f32
    scales: Tensor  # [n_blocks, n_groups] u8
    minima: Tensor  # [n_blocks, n_groups] u8
    q: Tensor  # [n_blocks, block_values] u8


def shrink_grid(step: float, first: int, last: int) -> tuple[tuple[float, float], ...]:
    """Every pair of multiples first..last of a step: what to cut off below and above."""
    parts = [step * multiple for multiple in range(first, last + 1)]
    return tuple((below, above) for below in parts for above in parts)


def fit_affine(values: Tensor, grid: AffineGrid) -> AffineFit:
    """The fit of blocks [n_blocks, block_values] f32, finite."""
    x = apart(values, grid.n_groups, -1).permute(2, 1, 0).contiguous()
    scale, minimum = _fit_groups(x, grid)
    d = round_f16(divide(scale.amax(0), grid.sub_top))
    d_min = round_f16(divide(minimum.amax(0), grid.sub_top))
    s = _nearest(scale, d, grid.sub_top)
    m = _nearest(minimum, d_min, grid.sub_top)
    s, m, error = _improve(x, d, d_min, s, m, grid)
    for _ in range(grid.rounds):
        new_d, new_d_min = _refit(x, d, d_min, s, m, grid)
        new_s, new_m, new_error = _improve(x, new_d, new_d_min, s, m, grid)
        better = fold(new_error) < fold(error)
        d, d_min = torch.where(better, new_d, d), torch.where(better, new_d_min, d_min)
        s, m = torch.where(better, new_s, s), torch.where(better, new_m, m)
        error = torch.where(better, new_error, error)
    q = _round(x, d * s, d_min * m, grid.top)
    return AffineFit(
        d=d,
        d_min=d_min,
        scales=s.T.to(torch.uint8),
        minima=m.T.to(torch.uint8),
        q=q.permute(2, 1, 0).flatten(1).to(torch.uint8),
    )


def _fit_groups(x: Tensor, grid: AffineGrid) -> tuple[Tensor, Tensor]:
    """Real scale and minimum of each group, both [n_groups, n_blocks] and not negative."""
    low = x.amin(0).clamp(max=0)
    width = x.amax(0) - low
    total = fold(x)
    best = torch.full_like(low, -torch.inf)
    scale, minimum = torch.zeros_like(low), -low
    for below, above in grid.shrinks:
        start = low + below * width
        q = _round(x, width * ((1 - below - above) / grid.top), -start, grid.top)
        new_scale, new_minimum, gain = _least_squares(x, q, total)
        better = gain > best
        best = torch.where(better, gain, best)
        scale = torch.where(better, new_scale, scale)
        minimum = torch.where(better, new_minimum, minimum)
    for _ in range(2):
        q = _round(x, scale, minimum, grid.top)
        scale, minimum, _gain = _least_squares(x, q, total)
    return scale, minimum


def _least_squares(x: Tensor, q: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each group's a, b >= 0 of least |x - (a q - b)|^2, and how much of |x|^2 that takes off."""
    n = x.shape[0]
    q_sum, q_square, q_x = fold(q), fold(q * q), fold(q * x)
    spread = n * q_square - q_sum * q_sum
    flat = spread <= 0
    a = (n * q_x - total * q_sum) / torch.where(flat, 1, spread)
    a = torch.where(flat, 0, a)
    b = (a * q_sum - total) / n
    # The stored minimum cannot be negative: then the line goes through zero.
    through_zero = b < 0
    a = torch.where(through_zero, q_x / q_square.clamp(min=1), a).clamp(min=0)
    b = b.clamp(min=0)
    return a, b, a * q_x - b * total


def _nearest(part: Tensor, unit: Tensor, most: int) -> Tensor:
    """The integers 0..most nearest to part / unit, as f32; 0 where the unit is 0."""
    return (part / torch.where(unit > 0, unit, torch.inf)).round().clamp(0, most)


def _round(x: Tensor, scale: Tensor, minimum: Tensor, top: int) -> Tensor:
    """The q 0..top nearest to (x + minimum) / scale, as f32; 0 where the scale is 0."""
    inverse = torch.where(scale > 0, 1 / scale, 0).clamp(max=torch.finfo(torch.float32).max)
    return ((x + minimum) * inverse).round().clamp(0, top)


def _error(x: Tensor, scale: Tensor, minimum: Tensor, top: int) -> Tensor:
    """Squared error of each group at its best q, [n_groups, n_blocks]."""
    miss = _round(x, scale, minimum, top) * scale - minimum - x
    return fold(miss * miss)


def _improve(
    x: Tensor, d: Tensor, d_min: Tensor, s: Tensor, m: Tensor, grid: AffineGrid
) -> tuple[Tensor, Tensor, Tensor]:
    """Each group's best integers among the neighbours of s and m, and its squared error."""
    best = _error(x, d * s, d_min * m, grid.top)
    best_s, best_m = s, m
    for step_s in (-1, 0, 1):
        for step_m in (-1, 0, 1):
            if step_s == step_m == 0:
                continue
            new_s = (s + step_s).clamp(0, grid.sub_top)
            new_m = (m + step_m).clamp(0, grid.sub_top)
            error = _error(x, d * new_s, d_min * new_m, grid.top)
            better = error < best
            best = torch.where(better, error, best)
            best_s = torch.where(better, new_s, best_s)
            best_m = torch.where(better, new_m, best_m)
    return best_s, best_m, best


def _refit(
    x: Tensor, d: Tensor, d_min: Tensor, s: Tensor, m: Tensor, grid: AffineGrid
) -> tuple[Tensor, Tensor]:
    """The d and d_min of least squared error over the block, its integers kept."""
    n = x.shape[0]
    q = _round(x, d * s, d_min * m, grid.top)
    q_sum = fold(q)
    p_square = fold(s * s * fold(q * q))
    p_x = fold(s * fold(q * x))
    m_square = n * fold(m * m)
    p_m = fold(s * m * q_sum)
    m_x = fold(m * fold(x))
    spread = p_square * m_square - p_m * p_m
    flat = spread <= 1e-6 * p_square * m_square
    spread = torch.where(flat, 1, spread)
    new_d = torch.where(flat, d, (p_x * m_square - m_x * p_m) / spread)
    new_d_min = torch.where(flat, d_min, (p_x * p_m - m_x * p_square) / spread)
    return round_f16(new_d.clamp(min=0)), round_f16(new_d_min.clamp(min=0))
