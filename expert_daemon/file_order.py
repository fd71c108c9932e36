"""Keys in the order of the files, where each key is looked up once, some at a time.

Looking one up takes about as long as a message; sorting those that are known takes next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Place = Callable[[tuple[int, int]], tuple[int, int]]  # of (layer, expert): shard, offset


class FileOrder:
    """Where keys begin in the files, as far as that was asked for."""

    def __init__(self, place: Place, n_layers: int, n_experts: int) -> None:
        self._place = place
        self._n_experts = n_experts
        self._shard = np.full(n_layers * n_experts, -1, np.int32)
        self._offset = np.zeros(n_layers * n_experts, np.int64)

    def learn(self, keys: NDArray[np.int64], most: int) -> bool:
        """Look up to `most` flat keys up; whether all of them are known now."""
        unknown = keys[self._shard[keys] < 0]
        for key in unknown[:most].tolist():
            self._shard[key], self._offset[key] = self._place(divmod(key, self._n_experts))
        return len(unknown) <= most

    def sorted(self, keys: NDArray[np.int64]) -> list[tuple[int, int]]:
        """(layer, expert) of flat keys that are known, ascending by the first byte's place."""
        ordered = keys[np.lexsort((self._offset[keys], self._shard[keys]))]
        layers, experts = np.divmod(ordered, self._n_experts)
        return list(zip(layers.tolist(), experts.tolist(), strict=True))
