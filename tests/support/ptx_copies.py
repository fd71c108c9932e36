"""Bulk copies that barriers count, and products of a warp, for `ptx_machine`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .ptx_operations import Lanes, cut, number


class BulkCopies:
    """The barriers of one program, by their addresses; each completes once."""

    def __init__(self) -> None:
        self._missing: dict[int, int] = {}

    def expect(self, barrier: int, n_bytes: int) -> None:
        """Note what is going to come."""
        assert barrier not in self._missing, "a barrier of one phase"
        self._missing[barrier] = n_bytes

    def came(self, barrier: int, n_bytes: int) -> None:
        """Note what is there."""
        self._missing[barrier] -= n_bytes
        assert self._missing[barrier] >= 0, "more came than was expected"

    def there(self, barrier: int) -> bool:
        """Whether all is there that was expected."""
        return self._missing.get(barrier, 1) == 0


def product(
    operation: str, a: Sequence[Lanes], b: Sequence[Lanes], c: Sequence[Lanes]
) -> list[Lanes]:
    """Return a lane's four sums of an m16n8k32 product in whole numbers.

    Source: PTX ISA, fragments of mma.m16n8k32 with 8-bit types.
    """
    assert ".m16n8k32." in operation and operation.endswith(".s32"), operation
    lane = np.arange(32)
    row, quad = lane // 4, lane % 4
    left, right = np.zeros((16, 32), np.int64), np.zeros((32, 8), np.int64)
    sums = np.zeros((16, 8), np.int64)
    kinds = operation.split(".")[-3:-1]
    for byte in range(4):
        shift = np.uint64(8 * byte)
        for i in range(4):
            left[row + 8 * (i % 2), 16 * (i // 2) + 4 * quad + byte] = _byte(
                a[i] >> shift, kinds[0]
            )
        for i in range(2):
            right[16 * i + 4 * quad + byte, row] = _byte(b[i] >> shift, kinds[1])
    for i in range(4):
        sums[row + 8 * (i // 2), 2 * quad + i % 2] = number(c[i], "s32")
    sums += left @ right
    return [cut(sums[row + 8 * (i // 2), 2 * quad + i % 2], 32) for i in range(4)]


def _byte(v: Lanes, kind: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return number(cut(v, 8), kind)
