"""Where the matrices of one fp4 expert lie in its slot."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fp4Shape:
    """Sizes of one expert, and how far from each matrix its scales begin."""

    hidden: int  # channels in and out
    width: int  # channels between
    gate_scale: int  # bytes
    up_scale: int  # bytes
    down_scale: int  # bytes
