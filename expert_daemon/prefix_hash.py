"""A slot's checksum taken while its parts arrive: each part as soon as all before it have come.

So the bytes are hashed while the drive reads the next ones, and are still in the processor's cache.
Called by the reader threads. Invariants: bytes are hashed once, in the order of the slot, and only
after their part has arrived for good.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import xxhash

from .read_plan import Part
from .source import Bytes


class PrefixHash:
    """Gives what `checksums.slot_checksum` does."""

    def __init__(
        self, memory: Bytes, parts: Sequence[Part], pieces: Sequence[tuple[int, int]]
    ) -> None:
        """`memory` u8 [slot_bytes], the parts that fill it, `pieces` (offset, bytes) in it."""
        self._memory = memory
        self._stretches = _stretches(parts, pieces)
        self._next = 0  # of the stretches, the first that is not hashed
        self._has_come = bytearray(len(parts))
        self._state = xxhash.xxh3_64()
        self._lock = threading.Lock()  # of the hashing

    def offer(self, part: int, window: Bytes, first: int) -> None:
        """A part's bytes are about to be copied: hash them here where all before them have been.

        Out of a cache, then, whatever the copy does. `window` u8, from the shard's byte `first` on.
        """
        if self._lock.acquire(blocking=False):
            try:
                self._advance()
                self._advance_in(part, window, first)
            finally:
                self._lock.release()

    def arrived(self, part: int) -> None:
        """A part's bytes stand in the slot; hash what can be, unless another thread is at it."""
        self._has_come[part] = 1
        if self._lock.acquire(blocking=False):
            try:
                self._advance()
            finally:
                self._lock.release()

    def finish(self) -> int:
        """Hash the rest, once all parts have arrived; return the checksum."""
        with self._lock:
            self._advance()
            assert self._next == len(self._stretches), "a part has not arrived"
            return self._state.intdigest()

    def _advance(self) -> None:
        while self._next < len(self._stretches):
            part, start, stop, _ = self._stretches[self._next]
            if not self._has_come[part]:
                return
            self._state.update(self._memory[start:stop].data)
            self._next += 1

    def _advance_in(self, part: int, window: Bytes, first: int) -> None:
        for owner, start, stop, shift in self._stretches[self._next :]:
            if owner != part:
                return
            self._state.update(window[start + shift - first : stop + shift - first].data)
            self._next += 1


def _stretches(
    parts: Sequence[Part], pieces: Sequence[tuple[int, int]]
) -> list[tuple[int, int, int, int]]:
    """Return (part, start, stop, shift) in the slot's order: the pieces, cut where parts meet.

    shift  what a place in the slot is to be added to for that in the shard
    """
    filled = sorted(
        (
            fragment.slot_offset,
            fragment.slot_offset + fragment.n_bytes,
            number,
            fragment.offset - fragment.slot_offset,
        )
        for number, part in enumerate(parts)
        for fragment in part.fragments
    )
    stretches = []
    place = 0
    for offset, n_bytes in pieces:
        end = offset + n_bytes
        while place < len(filled) and filled[place][1] <= offset:
            place += 1
        for start, stop, number, shift in filled[place:]:
            if start >= end:
                break
            stretches.append((number, max(start, offset), min(stop, end), shift))
    return stretches
