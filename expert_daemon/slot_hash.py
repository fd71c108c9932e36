"""A slot's checksum a step at a time, so that hashing can wait while somebody waits for a read."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from .source import Bytes

STEP_BYTES = 1 << 20


class SlotHash:
    """Gives what `checksums.slot_checksum` does, after as many steps as there are MiB."""

    def __init__(self, memory: Bytes, pieces: Sequence[tuple[int, int]]) -> None:
        """`memory` u8 [slot_bytes], `pieces` (offset, bytes) in it."""
        self.is_busy = False  # a thread is at it
        self._memory = memory
        self._left = [(offset, offset + n_bytes) for offset, n_bytes in reversed(pieces) if n_bytes]
        self._state = xxhash.xxh3_64()

    def step(self) -> bool:
        """Hash at most STEP_BYTES further; whether that was all."""
        room = STEP_BYTES
        while self._left and room:
            start, end = self._left.pop()
            stop = min(end, start + room)
            self._state.update(self._memory[start:stop].data)
            room -= stop - start
            if stop < end:
                self._left.append((stop, end))
        return not self._left

    @property
    def checksum(self) -> int:
        """xxh3_64 of what was hashed."""
        return self._state.intdigest()
