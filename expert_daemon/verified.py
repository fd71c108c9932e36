"""Which keys' bytes are known to be good: one bit a key, in the arena, so that a restart knows it.

A bit says that the bytes of the key's slot agreed with their checksum after the last time that
anybody but the daemon could have written to them. It means nothing while the key has no slot.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Verified:
    """The bits, u8 [n_keys / 8]; key layer * n_experts + expert, the lowest bit first."""

    def __init__(self, bits: NDArray[np.uint8]) -> None:
        self._bits = bits

    def __contains__(self, key: int) -> bool:
        return bool(self._bits[key >> 3] >> (key & 7) & 1)

    def add(self, key: int) -> None:
        """The key's bytes were hashed and are what they must be."""
        self._bits[key >> 3] |= np.uint8(1 << (key & 7))

    def clear(self) -> None:
        """Nothing is known any more."""
        self._bits.fill(0)
