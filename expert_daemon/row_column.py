"""One tensor of an Engram table: rows of a fixed size, one after the other in a shard."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from protocol.files.safetensors_index import Shard
from protocol.files.slice_map import ByteRange

from .log import log
from .range_reader import RangeReader, ReadFailure
from .source import PAGE_BYTES, Bytes, ReadKind

Integers = npt.NDArray[np.int64]
Failures = list[tuple[int, ReadFailure]]  # (index of the row asked for, why)


class _Run(NamedTuple):
    """Rows first .. last - 1: `n_bytes` at `offset` of the file go to `place` of the buffer."""

    first: int
    last: int
    offset: int
    n_bytes: int
    place: int


class Column:
    """Rows of `width` bytes; a width of 0 has nothing to read."""

    def __init__(
        self, place: ByteRange, width: int, shards: Sequence[Shard], ranges: RangeReader
    ) -> None:
        self.shard = list(shards).index(place.shard)
        self.width = width
        self._place = place
        self._ranges = ranges
        self._kept: npt.NDArray[np.uint8] | None = None

    def keep(self) -> None:
        """Hold the whole tensor in memory; a read error leaves it to single reads."""
        memory = np.empty(self._place.n_bytes, np.uint8)
        try:
            self._ranges.read_range(
                self.shard, self._place.offset, memory, n_bytes=len(memory), align=1
            )
        except ReadFailure as failure:
            log(f"Engram scales are not kept in memory: {failure.text}")
            return
        self._kept = memory.reshape(-1, self.width)

    @property
    def is_read(self) -> bool:
        """Whether rows come from the file, not from memory."""
        return self.width > 0 and self._kept is None

    def starts(self, rows: Integers) -> Integers:
        """Where rows begin in the file."""
        return self._place.offset + rows * self.width

    def copy_kept(self, rows: Integers, out: Bytes) -> None:
        """Fill `out`, u8 [n, width], from memory where the tensor is kept there."""
        if self._kept is not None:
            out[:] = self._kept[rows]

    def read_now(self, rows: Integers, bounce: Bytes, out: Bytes) -> bool:
        """Fill `out`, u8 [n, width], from memory or the page cache; False where it cannot."""
        if not self.is_read:
            self.copy_kept(rows, out)
            return True
        runs, places = self._runs(rows)
        read_into, shard = self._ranges.source.read_into, self.shard
        for run in runs:
            window = bounce[run.place : run.place + run.n_bytes]
            try:
                count = read_into(shard, run.offset, window, ReadKind.NOWAIT)
            except OSError:
                return False
            if count < run.n_bytes:
                return False
        out[:] = windows(bounce, self.width)[places]
        return True

    def read_cached(self, rows: Integers, bounce: Bytes, out: Bytes) -> Failures:
        """Fill `out`, u8 [n, width], of ascending `rows` through the page cache."""
        if not self.is_read:
            self.copy_kept(rows, out)
            return []
        runs, places = self._runs(rows)
        failures: Failures = []
        for run in runs:
            try:
                self._read_window(run.offset, bounce[run.place : run.place + run.n_bytes])
            except ReadFailure as failure:
                indices = range(run.first, run.last)
                if len(indices) == 1:
                    failures.append((run.first, failure))
                else:
                    failures += self.read_singly(rows, indices, bounce, places)
        out[:] = windows(bounce, self.width)[places]
        return failures

    def read_singly(
        self, rows: Integers, indices: Iterable[int], bounce: Bytes, places: Integers
    ) -> Failures:
        """Read some of the rows one at a time to their `places` in the buffer."""
        starts = self.starts(rows)
        failures: Failures = []
        for index in indices:
            place = int(places[index])
            try:
                self._read_window(int(starts[index]), bounce[place : place + self.width])
            except ReadFailure as failure:
                failures.append((index, failure))
        return failures

    def _read_window(self, offset: int, window: Bytes) -> None:
        self._ranges.read_range(
            self.shard, offset, window, n_bytes=len(window), align=1, kind=ReadKind.CACHED
        )

    def _runs(self, rows: Integers) -> tuple[list[_Run], Integers]:
        """Return reads of rows less than a page apart, and where each row is in the buffer."""
        starts = self.starts(rows)
        cuts = np.flatnonzero(starts[1:] - starts[:-1] >= PAGE_BYTES + self.width) + 1
        bounds = [0, *cuts.tolist(), len(rows)]
        runs = []
        shifts = []  # from the file to the buffer
        place = 0
        for first, last in itertools.pairwise(bounds):
            offset = int(starts[first])
            n_bytes = int(starts[last - 1]) - offset + self.width
            runs.append(_Run(first, last, offset, n_bytes, place))
            shifts.append(place - offset)
            place += n_bytes
        return runs, starts + np.repeat(shifts, np.diff(bounds))


def windows(memory: Bytes, width: int) -> Bytes:
    """Return u8 [n, width]: row i is the bytes of `memory` from i on, none of them copied."""
    n_windows = len(memory) - width + 1
    return np.lib.stride_tricks.as_strided(memory, (n_windows, width), (1, 1), writeable=False)
