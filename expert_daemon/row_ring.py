"""Which rows of the Engram row ring are taken. Pure."""

from __future__ import annotations


class RowRing:
    """Hands out contiguous regions of `n_rows` ring rows, first fit, and takes them back."""

    def __init__(self, n_rows: int) -> None:
        self.n_rows = n_rows
        self._free = [(0, n_rows)] if n_rows else []  # (position, rows), ascending, not touching

    @property
    def n_free(self) -> int:
        """Rows that are free, in however many regions."""
        return sum(n_rows for _, n_rows in self._free)

    def take(self, n_rows: int, first: int = 0, end: int | None = None) -> int | None:
        """Return the position of a region that was free, or None where none is large enough.

        first, end  only ring rows from `first` on and before `end` are taken; None: all
        """
        last = self.n_rows if end is None else end
        for index, (position, n_free) in enumerate(self._free):
            start, stop = max(position, first), position + n_free
            if min(stop, last) - start >= n_rows:
                rest = [(position, start - position), (start + n_rows, stop - start - n_rows)]
                self._free[index : index + 1] = [part for part in rest if part[1]]
                return start
        return None

    def give(self, position: int, n_rows: int) -> None:
        """Make a region free again that `take` returned."""
        self._free.append((position, n_rows))
        self._free.sort()
        merged: list[tuple[int, int]] = []
        for start, length in self._free:
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged
