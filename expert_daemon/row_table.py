"""Rows of one Engram table from its shard: values and scales of many rows in few reads.

In the official shards a row is two reads, its values and its scales being in two tensors. Small
scale tensors are kept in memory. Reads go through the page cache: rows are asked for again.
Rows that share a page, or lie less than a page apart, are read at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from protocol.files.safetensors_index import Shard
from protocol.files.slice_map import ByteRange, EngramTable

from .log import log
from .range_reader import RangeReader, ReadFailure
from .source import Bytes, ReadKind

PAGE_BYTES = 4096
MAX_BATCH_ROWS = 512
MAX_BATCH_BYTES = 4 << 20  # what the bounce buffers hold at least
MAX_SCALES_KEPT_BYTES = 16 << 20

Rows = npt.NDArray[np.int64]
RowFault = tuple[int, str, str]  # row, code, text


class RowTable:
    """One table's reader; `read` may run on any thread."""

    def __init__(self, table: EngramTable, shards: Sequence[Shard], ranges: RangeReader) -> None:
        self.n_rows = table.n_rows
        self.value_bytes = table.value_bytes
        self.row_bytes = table.row_bytes
        self.batch_rows = min(MAX_BATCH_ROWS, MAX_BATCH_BYTES // (PAGE_BYTES + table.row_bytes))
        self._table = table
        self._ranges = ranges
        self._values = _Column(table.values, table.value_bytes, shards, ranges)
        self._scales = _Column(table.scales, table.scale_bytes, shards, ranges)
        if 0 < table.scales.n_bytes <= MAX_SCALES_KEPT_BYTES:
            self._scales.keep()

    def read_cached(self, rows: Rows, bounce: Bytes) -> Bytes | None:
        """Return u8 [n, row_bytes] of ascending `rows`, or None where the page cache lacks some."""
        out = np.empty((len(rows), self.row_bytes), np.uint8)
        if not self._values.read_now(rows, bounce, out[:, : self.value_bytes]):
            return None
        if not self._scales.read_now(rows, bounce, out[:, self.value_bytes :]):
            return None
        return out

    def read(self, rows: Rows, bounce: Bytes) -> tuple[Bytes, list[RowFault]]:
        """Return u8 [n, row_bytes] of ascending `rows`, at most `batch_rows`, and the faults.

        A row that could not be read is zero.
        """
        out = np.zeros((len(rows), self.row_bytes), np.uint8)
        faults: dict[int, RowFault] = {}
        for column, part in (
            (self._values, out[:, : self.value_bytes]),
            (self._scales, out[:, self.value_bytes :]),
        ):
            for index, failure in column.read(rows, bounce, part):
                row = int(rows[index])
                text = f"Engram table {self._table.index} row {row}: {failure.text}"
                faults.setdefault(row, (row, failure.code, text))
        for row in faults:
            out[rows == row] = 0
        return out, [faults[row] for row in sorted(faults)]


class _Run(NamedTuple):
    """Rows first .. last - 1: `n_bytes` at `offset` of the file go to `place` of the buffer."""

    first: int
    last: int
    offset: int
    n_bytes: int
    place: int


class _Column:
    """One tensor of fixed-size rows in a shard."""

    def __init__(
        self, place: ByteRange, width: int, shards: Sequence[Shard], ranges: RangeReader
    ) -> None:
        self._shard = list(shards).index(place.shard)
        self._place = place
        self._width = width
        self._ranges = ranges
        self._columns = np.arange(width)
        self._kept: npt.NDArray[np.uint8] | None = None

    def keep(self) -> None:
        """Hold the whole tensor in memory; a read error leaves it to single reads."""
        memory = np.empty(self._place.n_bytes, np.uint8)
        try:
            self._ranges.read_range(
                self._shard, self._place.offset, memory, n_bytes=len(memory), align=1
            )
        except ReadFailure as failure:
            log(f"Engram scales are not kept in memory: {failure.text}")
            return
        self._kept = memory.reshape(-1, self._width)

    def read_now(self, rows: Rows, bounce: Bytes, out: Bytes) -> bool:
        """Fill `out`, u8 [n, width], from memory or the page cache; False where it cannot."""
        if self._kept is not None:
            out[:] = self._kept[rows]
            return True
        runs, places = self._runs(rows)
        read_into, shard = self._ranges.source.read_into, self._shard
        for run in runs:
            window = bounce[run.place : run.place + run.n_bytes]
            try:
                count = read_into(shard, run.offset, window, ReadKind.NOWAIT)
            except OSError:
                return False
            if count < run.n_bytes:
                return False
        out[:] = bounce[places]
        return True

    def read(self, rows: Rows, bounce: Bytes, out: Bytes) -> list[tuple[int, ReadFailure]]:
        """Fill `out`, u8 [n, width]; return (index, failure) of each row that failed."""
        if self._kept is not None:
            out[:] = self._kept[rows]
            return []
        runs, places = self._runs(rows)
        failures = []
        for run in runs:
            try:
                self._read_window(run.offset, bounce[run.place : run.place + run.n_bytes])
            except ReadFailure as failure:
                if run.last - run.first == 1:
                    failures.append((run.first, failure))
                else:
                    failures += self._read_singly(rows, run, bounce)
        out[:] = bounce[places]
        return failures

    def _read_singly(self, rows: Rows, run: _Run, bounce: Bytes) -> list[tuple[int, ReadFailure]]:
        failures = []
        for index in range(run.first, run.last):
            offset = self._place.offset + int(rows[index]) * self._width
            place = run.place + offset - run.offset
            try:
                self._read_window(offset, bounce[place : place + self._width])
            except ReadFailure as failure:
                failures.append((index, failure))
        return failures

    def _read_window(self, offset: int, window: Bytes) -> None:
        self._ranges.read_range(
            self._shard, offset, window, n_bytes=len(window), align=1, kind=ReadKind.CACHED
        )

    def _runs(self, rows: Rows) -> tuple[list[_Run], npt.NDArray[np.int64]]:
        """Return reads of rows less than a page apart, and each row's bytes in the bounce buffer.

        The runs stand in the buffer one after the other; places are [n, width].
        """
        starts = self._place.offset + rows * self._width
        cuts = np.flatnonzero(starts[1:] - starts[:-1] >= PAGE_BYTES + self._width) + 1
        bounds = [0, *cuts.tolist(), len(rows)]
        runs = []
        shifts = []  # from the file to the buffer
        place = 0
        for first, last in itertools.pairwise(bounds):
            offset = int(starts[first])
            n_bytes = int(starts[last - 1]) - offset + self._width
            runs.append(_Run(first, last, offset, n_bytes, place))
            shifts.append(place - offset)
            place += n_bytes
        lengths = np.diff(bounds)
        return runs, (starts + np.repeat(shifts, lengths))[:, None] + self._columns
