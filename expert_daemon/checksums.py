"""The checksum of each expert's bytes as they were first read; what is read later must agree.

A source that brings checksums of its own is held to those. Used from the reader threads and the
loop's: a checksum is one word, and its own presence (0: not known).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from .model_state import ModelState
from .source import Bytes

NAME = "checksums"


def slot_checksum(memory: Bytes, pieces: Sequence[tuple[int, int]]) -> int:
    """Return the xxh3_64 over a slot's pieces, without padding. Source: PROTOCOL.md section 8."""
    state = xxhash.xxh3_64()
    for offset, n_bytes in pieces:
        if n_bytes:
            state.update(memory[offset : offset + n_bytes].data)
    return state.intdigest()


class Checksums:
    """u64 of each key, flat: layer * n_experts + expert."""

    def __init__(
        self,
        n_layers: int,
        n_experts: int,
        state: ModelState | None = None,
        source: NDArray[np.uint64] | None = None,
    ) -> None:
        """Begin with the source's own, u64 [n_layers, n_experts], else with those in `state`."""
        self._n_experts = n_experts
        self._lock = threading.Lock()
        self._state = state if source is None else None
        self._n_changes = 0
        self._n_saved = 0
        self._source = np.zeros(n_layers * n_experts, np.dtype("<u8"))
        if source is not None:
            self._source[:] = source.reshape(-1)
        self._known = self._source.copy()
        saved = self._state.read(NAME) if self._state is not None else None
        if saved is not None and len(saved) == self._known.nbytes:
            self._known[:] = np.frombuffer(saved, "<u8")

    @property
    def n_known(self) -> int:
        """Keys whose checksum is known."""
        return int(np.count_nonzero(self._known))

    def known(self, layer: int, expert: int) -> int:
        """The checksum that the key's bytes must have; 0: not known."""
        return int(self._known[layer * self._n_experts + expert])

    def learn(self, layer: int, expert: int, checksum: int) -> int:
        """Return the key's checksum; where none is known it is this one from now on."""
        key = layer * self._n_experts + expert
        known = int(self._known[key])
        if known:
            return known
        with self._lock:
            known = int(self._known[key])
            if not known:
                self._known[key] = checksum
                self._n_changes += 1
            return known or checksum

    def forget(self, layer: int, expert: int) -> None:
        """Take the key's next bytes as they come, unless the source says what they must be."""
        key = layer * self._n_experts + expert
        with self._lock:
            self._known[key] = self._source[key]
            self._n_changes += 1

    def save(self) -> None:
        """Write what changed since the last time, where there is a state to write to."""
        n_changes = self._n_changes
        if self._state is None or n_changes == self._n_saved:
            return
        if self._state.write(NAME, self._known.tobytes()):
            self._n_saved = n_changes
