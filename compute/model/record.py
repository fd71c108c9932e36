"""What a forward pass leaves for others to look at: picks for the daemon, the rest for tests."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(slots=True)
class Record:
    """Filled by one forward pass. Picks always; everything else with `full`."""

    full: bool = False
    picks: list[Tensor] = field(default_factory=list)  # a layer: [T, top_k] int64, ascending
    weights: list[Tensor] = field(default_factory=list)  # a layer: [T, top_k] f32, as picks
    streams: list[Tensor] = field(default_factory=list)  # a layer: [T, S, H] after it
    pre: list[Tensor] = field(default_factory=list)  # a layer: [T, S] handed to the next
    selections: dict[int, Tensor] = field(default_factory=dict)  # [T, index_top_k], -1 = none
    engram_rows: list[NDArray[np.int64]] = field(default_factory=list)  # a table: [T, columns]
