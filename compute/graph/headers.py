"""What the routing kernels leave for the host: a layer's flag, picks, weights and slots.

The kernels write into the host's own memory, so a layer's header is there while the layers behind
it still run. Invariants: a header is used once all of its words have come, in whatever order; a
pick is validated before anything is asked for because of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from protocol.errors import ShardError

_NOT_YET = -0x7FFF_FFFF  # no count, no pick, no slot; the bits of no weight, which is positive
_LOOKS = 500  # some 0.1 ms, between two questions whether the device has ended
WAIT_S = 60.0


class Headers:
    """Headers [n_layers, 1 + 3 * top_k] i32 in the host's memory, page-locked where a GPU writes.

    A row: number of absent picks, picks ascending, the bits of their weights, their slots.
    """

    def __init__(self, rows: Tensor, n_experts: int) -> None:
        self._rows: NDArray[np.int32] = rows.numpy()
        self._n_experts = n_experts
        self.top_k = (rows.shape[1] - 1) // 3

    def expect(self, first: int, end: int) -> None:
        """Layers first to end - 1 are launched next; nothing writes their headers now."""
        self._rows[first:end] = _NOT_YET

    def first_flagged(self, first: int, end: int, has_ended: Callable[[], bool]) -> int:
        """Wait for the layers' headers in turn; the first with an absent pick, -1 where none has.

        has_ended  whether the device has done all that was launched

        Raises ShardError for a header that did not come by then, or in 60 s.
        """
        for layer in range(first, end):
            self._await(layer, has_ended)
            if self._rows[layer, 0]:
                return layer
        return -1

    def _await(self, layer: int, has_ended: Callable[[], bool]) -> None:
        looks, late = 0, time.monotonic() + WAIT_S
        while not self._has_come(layer):
            looks += 1
            if looks % _LOOKS:
                continue
            time.sleep(0)  # lets go of the interpreter
            if has_ended() and not self._has_come(layer):
                raise ShardError(f"layer {layer}: the device ended without its header")
            if time.monotonic() > late:
                raise ShardError(f"layer {layer}: waited {WAIT_S:g} s for its header")

    def _has_come(self, layer: int) -> bool:
        row = self._rows[layer]
        return bool(row[0] != _NOT_YET) and not (row == _NOT_YET).any()

    def picks(self, layer: int) -> list[int]:
        """Return a layer's picks, ascending. Raises ShardError where they are none."""
        picks: list[int] = self._rows[layer, 1 : 1 + self.top_k].tolist()
        ascends = all(low < high for low, high in pairwise(picks))
        if not ascends or picks[0] < 0 or picks[-1] >= self._n_experts:
            raise ShardError(f"layer {layer}: the router picked {picks} of {self._n_experts}")
        return picks

    def absent(self, layer: int) -> list[int]:
        """Return the layer's absent picks, ascending."""
        slots = self._rows[layer, 1 + 2 * self.top_k :].tolist()
        return [pick for pick, slot in zip(self.picks(layer), slots, strict=True) if slot < 0]

    def n_below(self, n_device: int) -> int:
        """Return the number of picks of all layers whose slot is below `n_device`."""
        slots = self._rows[:, 1 + 2 * self.top_k :]
        return int(((slots >= 0) & (slots < n_device)).sum()) if n_device else 0

    def all_picks(self) -> NDArray[np.int64]:
        """Return the picks of all layers [n_layers, top_k]. Raises ShardError as `picks` does."""
        picks = self._rows[:, 1 : 1 + self.top_k].astype(np.int64)
        ascending = (np.diff(picks, axis=1) > 0).all(1) & (picks[:, 0] >= 0)
        fine = ascending & (picks[:, -1] < self._n_experts)
        if not fine.all():
            self.picks(int(fine.argmin()))
        return picks
