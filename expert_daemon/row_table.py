"""Rows of one Engram table from its shard: values and scales of many rows at once.

In the official shards a row is two reads, its values and its scales being in two tensors; in our
packs it is one. Small scale tensors are kept in memory. Where direct reads work, the pages of a
batch are read directly, all at once; else rows that lie less than a page apart are read one run
after the other through the page cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from protocol.files.safetensors_index import Shard
from protocol.files.slice_map import EngramTable

from .range_reader import RangeReader
from .row_column import Column, Failures, Integers, windows
from .row_pages import PageReads, most_bytes, plan_page_reads
from .source import PAGE_BYTES, Bytes, ManyReads

MAX_BATCH_ROWS = 512
MAX_BATCH_BYTES = 8 << 20  # what the bounce buffers hold at least
MAX_SCALES_KEPT_BYTES = 16 << 20

RowFault = tuple[int, str, str]  # row, code, text


class RowsRead(NamedTuple):
    """What a batch gave: a row that could not be read is zero."""

    data: Bytes  # u8 [n, row_bytes]
    faults: list[RowFault]
    n_pages: int  # of 4 KiB, read for it


class RowTable:
    """One table's reader; `read` may run on any thread."""

    def __init__(self, table: EngramTable, shards: Sequence[Shard], ranges: RangeReader) -> None:
        self.n_rows = table.n_rows
        self.value_bytes = table.value_bytes
        self.row_bytes = table.row_bytes
        self._table = table
        self._ranges = ranges
        self._values = Column(table.values, table.value_bytes, shards, ranges)
        self._scales = Column(table.scales, table.scale_bytes, shards, ranges)
        if 0 < table.scales.n_bytes <= MAX_SCALES_KEPT_BYTES:
            self._scales.keep()
        self.batch_rows = max(1, min(MAX_BATCH_ROWS, MAX_BATCH_BYTES // self._most_bytes()))

    def _most_bytes(self) -> int:
        """Bytes of buffer that one row may need."""
        source = self._ranges.source
        return sum(
            most_bytes(1, column.width, max(PAGE_BYTES, source.alignment(column.shard)))
            for column in (self._values, self._scales)
        )

    @property
    def _is_direct(self) -> bool:
        source = self._ranges.source
        columns = (self._values, self._scales)
        return all(source.alignment(one.shard) > 1 for one in columns if one.is_read)

    def read_now(self, rows: Integers, bounce: Bytes) -> Bytes | None:
        """Return u8 [n, row_bytes] of ascending `rows`, or None where the page cache lacks some.

        Where rows are read directly the page cache has none.
        """
        if self._is_direct and self._values.is_read:
            return None
        out = np.empty((len(rows), self.row_bytes), np.uint8)
        values, scales = out[:, : self.value_bytes], out[:, self.value_bytes :]
        if not self._values.read_now(rows, bounce, values):
            return None
        if not self._scales.read_now(rows, bounce, scales):
            return None
        return out

    def read(self, rows: Integers, bounce: Bytes) -> RowsRead:
        """Return ascending `rows`, none twice, at most `batch_rows`."""
        out = np.zeros((len(rows), self.row_bytes), np.uint8)
        parts = (
            (self._values, out[:, : self.value_bytes]),
            (self._scales, out[:, self.value_bytes :]),
        )
        if self._is_direct:
            failures, n_pages = self._read_pages(rows, bounce, parts)
        else:
            failures, n_pages = [], 0
            for column, part in parts:
                failures += column.read_cached(rows, bounce, part)
                n_pages += column.is_read * len(rows)
        faults: dict[int, RowFault] = {}
        for index, failure in failures:
            out[index] = 0
            row = int(rows[index])
            text = f"Engram table {self._table.index} row {row}: {failure.text}"
            faults.setdefault(row, (row, failure.code, text))
        return RowsRead(out, [faults[row] for row in sorted(faults)], n_pages)

    def _read_pages(
        self, rows: Integers, bounce: Bytes, parts: Sequence[tuple[Column, Bytes]]
    ) -> tuple[Failures, int]:
        """Read each page that is needed, once, all at the same time."""
        plans: list[tuple[Column, Bytes, PageReads]] = []
        end = 0
        for column, part in parts:
            column.copy_kept(rows, part)
            if column.is_read:
                page = self._ranges.source.alignment(column.shard)
                plan = plan_page_reads(column.starts(rows), column.width, page, end)
                plans.append((column, part, plan))
                end = plan.end
        if not plans:
            return [], 0
        came = self._ranges.source.read_many(_joined(plans), bounce)
        failures: Failures = []
        for column, part, plan in plans:
            is_short = came[: len(plan.offsets)] < plan.needed
            came = came[len(plan.offsets) :]
            if is_short.any():
                again = np.flatnonzero(is_short[plan.row_read]).tolist()
                failures += column.read_singly(rows, again, bounce, plan.row_places)
            part[:] = windows(bounce, column.width)[plan.row_places]
        return failures, end // PAGE_BYTES


def _joined(plans: Sequence[tuple[Column, Bytes, PageReads]]) -> ManyReads:
    """Return the reads of all columns, in their order."""
    shards = [np.full(len(plan.offsets), column.shard) for column, _, plan in plans]
    return ManyReads(
        shards=np.concatenate(shards),
        offsets=np.concatenate([plan.offsets for _, _, plan in plans]),
        n_bytes=np.concatenate([plan.n_bytes for _, _, plan in plans]),
        places=np.concatenate([plan.places for _, _, plan in plans]),
    )
