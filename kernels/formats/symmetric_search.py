"""Search for the scales of a block whose groups are `d * s * q`, q and s signed.

First every group alone: several stretches of its largest value over the range of q, either sign,
each rounded and refitted by least squares, the best one refined. Then the block: the groups' scales
become small integers of a common `d`, each group tries the neighbouring ones, and `d` is refitted
by least squares over the whole block. Every choice is by squared error.

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
class SymmetricGrid:
    """What a symmetric format can express, and how far the search goes."""

    n_groups: int  # groups in a block
    half: int  # q runs from -half to half - 1
    sub_half: int  # s runs from -sub_half to sub_half - 1
    stretches: tuple[float, ...]  # added to the q that the group's largest value maps to
    rounds: int  # refits of the whole block


@dataclass(frozen=True, slots=True)
class SymmetricFit:
    """The numbers to store, one row a block; d is a float16 value."""

    d: Tensor  # [n_blocks] f32
    scales: Tensor  # [n_blocks, n_groups] i32
    q: Tensor  # [n_blocks, block_values] i32


def fit_symmetric(values: Tensor, grid: SymmetricGrid) -> SymmetricFit:
    """The fit of blocks [n_blocks, block_values] f32, finite."""
    x = apart(values, grid.n_groups, -1).permute(2, 1, 0).contiguous()
    scale = _fit_groups(x, grid)
    d = _unit(scale, grid)
    s = _nearest(scale, d, grid)
    s, error = _improve(x, d, s, grid)
    for _ in range(grid.rounds):
        new_d = _refit(x, d, s, grid)
        new_s, new_error = _improve(x, new_d, s, grid)
        better = fold(new_error) < fold(error)
        d, s = torch.where(better, new_d, d), torch.where(better, new_s, s)
        error = torch.where(better, new_error, error)
    q = _round(x, d * s, grid.half)
    return SymmetricFit(
        d=d,
        scales=s.T.to(torch.int32),
        q=q.permute(2, 1, 0).flatten(1).to(torch.int32),
    )


def _fit_groups(x: Tensor, grid: SymmetricGrid) -> Tensor:
    """Real scale of each group, [n_groups, n_blocks], of either sign."""
    high, low = x.amax(0), x.amin(0)
    largest = torch.where(high > -low, high, low)
    best = torch.full_like(largest, -torch.inf)
    scale = torch.zeros_like(largest)
    for stretch in grid.stretches:
        for steps in (-grid.half - stretch, grid.half - 1 + stretch):
            new_scale, gain = _least_squares(x, _round(x, divide(largest, steps), grid.half))
            better = gain > best
            best = torch.where(better, gain, best)
            scale = torch.where(better, new_scale, scale)
    for _ in range(2):
        scale, _gain = _least_squares(x, _round(x, scale, grid.half))
    return scale


def _least_squares(x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Each group's a of least |x - a q|^2, and how much of |x|^2 that takes off."""
    q_x = fold(q * x)
    a = q_x / fold(q * q).clamp(min=1)
    return a, a * q_x


def _unit(scale: Tensor, grid: SymmetricGrid) -> Tensor:
    """The d [n_blocks] with which the block's largest scale is -sub_half."""
    high, low = scale.amax(0), scale.amin(0)
    return round_f16(torch.where(high > -low, high, low) / -grid.sub_half)


def _nearest(scale: Tensor, d: Tensor, grid: SymmetricGrid) -> Tensor:
    """The integers nearest to scale / d, as f32; 0 where d is 0."""
    ratio = scale / torch.where(d != 0, d, torch.inf)
    return ratio.round().clamp(-grid.sub_half, grid.sub_half - 1)


def _round(x: Tensor, scale: Tensor, half: int) -> Tensor:
    """The q nearest to x / scale, as f32; 0 where the scale is 0."""
    most = torch.finfo(torch.float32).max
    inverse = torch.where(scale != 0, 1 / scale, 0).clamp(-most, most)
    return (x * inverse).round().clamp(-half, half - 1)


def _error(x: Tensor, scale: Tensor, half: int) -> Tensor:
    """Squared error of each group at its best q, [n_groups, n_blocks]."""
    miss = _round(x, scale, half) * scale - x
    return fold(miss * miss)


def _improve(x: Tensor, d: Tensor, s: Tensor, grid: SymmetricGrid) -> tuple[Tensor, Tensor]:
    """Each group's best integer among the neighbours of s, and its squared error."""
    best, best_s = _error(x, d * s, grid.half), s
    for step in (-1, 1):
        new_s = (s + step).clamp(-grid.sub_half, grid.sub_half - 1)
        error = _error(x, d * new_s, grid.half)
        better = error < best
        best = torch.where(better, error, best)
        best_s = torch.where(better, new_s, best_s)
    return best_s, best


def _refit(x: Tensor, d: Tensor, s: Tensor, grid: SymmetricGrid) -> Tensor:
    """The d of least squared error over the block, its integers kept."""
    q = _round(x, d * s, grid.half)
    square = fold(s * s * fold(q * q))
    return round_f16(fold(s * fold(q * x)) / square.clamp(min=1))
