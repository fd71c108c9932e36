"""What the routing kernels leave for the host: a layer's flag, picks, weights and slots.

Invariants: a pick is validated before anything is asked for because of it.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.errors import ShardError


class Headers:
    """The host's copy of the device's headers [n_layers, 1 + 3 * top_k] i32.

    A row: number of absent picks, picks ascending, the bits of their weights, their slots.
    """

    def __init__(self, device_headers: Tensor, n_experts: int) -> None:
        self._device = device_headers
        pinned = device_headers.is_cuda
        self._host = torch.zeros(device_headers.shape, dtype=torch.int32, pin_memory=pinned)
        self._rows: NDArray[np.int32] = self._host.numpy()
        self._n_experts = n_experts
        self.top_k = (device_headers.shape[1] - 1) // 3

    def read(self, first: int, end: int) -> None:
        """Start copying the rows of layers first to end - 1; they are there after a wait."""
        self._host[first:end].copy_(self._device[first:end], non_blocking=True)

    def n_absent(self, first: int, end: int) -> list[int]:
        """Return the number of absent picks of each layer."""
        absent: list[int] = self._rows[first:end, 0].tolist()
        return absent

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
