"""Activation roundings that note values close to a midpoint and can round them the other way.

An event is one value of one rounding of one layer of one step. Its name says which: two runs with
the same inputs give it the same name, so that a second run can flip what the first one noted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from compute.model.precision import Numerics, Precision
from kernels.formats import e8m0, fp4, fp8
from kernels.reference.round_fp4_index import round_fp4_index
from kernels.reference.round_fp4_latent import round_fp4_latent
from kernels.reference.round_fp8 import round_fp8

RELATIVE = 1e-4  # how far from a midpoint a value may be, as a share of itself
STORED = ("window", "index key", "latent", "latent scale")

E4M3_GRID = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
E2M1_GRID = torch.tensor(fp4.MAGNITUDES, dtype=torch.float64)


class Event(NamedTuple):
    """Where in a step a value was rounded."""

    layer: int
    number: int  # of the rounding within the layer
    place: int  # of the value within the rounding
    kind: str


class Noted(NamedTuple):
    """A value near a midpoint."""

    event: Event
    value: float  # before rounding, in units of its scale
    midpoint: float


class NearTies:
    """The roundings of the precision `wide`, watched.

    `layer` is set by whoever runs the layers; `flips` says which events round the other way.
    """

    def __init__(self) -> None:
        self.layer = 0
        self.flips: frozenset[Event] = frozenset()
        self.noted: list[Noted] = []
        self._numbers: dict[int, int] = {}

    def begin(self, flips: frozenset[Event]) -> None:
        """Start a step."""
        self.flips = flips
        self.noted = []
        self._numbers = {}

    def numerics(self) -> Numerics:
        """Return what a model needs to be watched."""
        return dataclasses.replace(
            Numerics.of(Precision.WIDE),
            round_input=lambda x: self._fp8(x, "input"),
            round_window=lambda x: self._fp8(x, "window"),
            round_index=lambda x: self._index(x, "index key" if x.ndim == 2 else "index query"),
            round_latent=lambda x: self._latent(x, "latent"),
        )

    def _fp8(self, x: Tensor, kind: str) -> Tensor:
        groups = _groups(x, 32)
        amax = groups.abs().amax(-1, keepdim=True).clamp_min(1e-4)
        scale = self._power_of_two(amax * 0.0022321429569274187, kind)
        y = self._grid(groups / scale, fp8.round_to_grid, E4M3_GRID, kind) * scale
        return self._checked(y.flatten(-2), x, round_fp8)

    def _index(self, x: Tensor, kind: str) -> Tensor:
        groups = _groups(x, 32)
        amax = groups.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-126)
        scale = self._power_of_two(amax * 0.1666666716337204, kind)
        y = self._grid(groups / scale, fp4.round_to_grid, E2M1_GRID, kind) * scale
        return self._checked(y.flatten(-2), x, round_fp4_index)

    def _latent(self, x: Tensor, kind: str) -> Tensor:
        groups = _groups(x, 16)
        amax = groups.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-9)
        scale = self._grid(amax / 6, fp8.round_to_grid, E4M3_GRID, f"{kind} scale")
        y = self._grid(groups / scale, fp4.round_to_grid, E2M1_GRID, kind) * scale
        return self._checked(y.flatten(-2), x, round_fp4_latent)

    def _checked(self, y: Tensor, x: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
        """Without flips, this is the operator itself."""
        assert self.flips or torch.equal(y, rounding(x))
        return y

    def _grid(
        self, v: Tensor, round_to_grid: Callable[[Tensor], Tensor], grid: Tensor, kind: str
    ) -> Tensor:
        q = round_to_grid(v)
        midpoints = (grid[1:] + grid[:-1]) / 2
        magnitude = v.double().abs()
        above = torch.searchsorted(midpoints, magnitude).clamp_max(len(midpoints) - 1)
        below = (above - 1).clamp_min(0)
        is_below = (magnitude - midpoints[below]).abs() < (magnitude - midpoints[above]).abs()
        nearest = torch.where(is_below, below, above)
        near = (magnitude - midpoints[nearest]).abs() <= RELATIVE * magnitude
        other = (grid[nearest] + grid[nearest + 1]).float() - q.abs()
        return self._flipped(v, q, torch.copysign(other, v), midpoints[nearest], near, kind)

    def _power_of_two(self, v: Tensor, kind: str) -> Tensor:
        q = e8m0.power_of_two_at_least(v)
        boundary = torch.where(v.double() > 0.75 * q.double(), q, q / 2)
        near = (v.double() - boundary.double()).abs() <= RELATIVE * v.double()
        other = torch.where(boundary == q, q * 2, q / 2)
        return self._flipped(v, q, other, boundary, near, f"{kind} scale")

    def _flipped(
        self, v: Tensor, q: Tensor, other: Tensor, midpoints: Tensor, near: Tensor, kind: str
    ) -> Tensor:
        number = self._numbers.get(self.layer, 0)
        self._numbers[self.layer] = number + 1
        result = q.flatten().clone()
        for index in near.flatten().nonzero().flatten().tolist():
            event = Event(self.layer, number, index, kind)
            value, midpoint = float(v.flatten()[index]), float(midpoints.flatten()[index])
            self.noted.append(Noted(event, value, midpoint))
            if event in self.flips:
                result[index] = other.flatten()[index]
        return result.view(q.shape)


def _groups(x: Tensor, size: int) -> Tensor:
    return torch.unflatten(x.float(), -1, (-1, size))
