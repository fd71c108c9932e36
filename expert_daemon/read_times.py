"""How long experts took to be read, as a histogram."""

from __future__ import annotations

from bisect import bisect_left

BOUNDS_MS = (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


class ReadTimes:
    """Counts by upper bound; from a read's submission to the checksum of its last byte."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_MS) + 1)

    def note(self, read_ns: int) -> None:
        """Count one read."""
        self._counts[bisect_left(BOUNDS_MS, read_ns / 1e6)] += 1

    def values(self) -> dict[str, int]:
        """Reads that took at most so many milliseconds, `read_ms_le_5` and so on."""
        total = 0
        values = {}
        for bound, count in zip(BOUNDS_MS, self._counts, strict=False):
            total += count
            values[stat_name(bound)] = total
        return values


def stat_name(bound_ms: float) -> str:
    """The name in Stats of the reads that took at most so long."""
    return f"read_ms_le_{bound_ms:g}"
