"""One request for Engram rows, and the batches in which they are read. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .row_table import RowFault

Integers = npt.NDArray[np.int64]
Wanted = Sequence[tuple[int, npt.NDArray[np.uint32]]]  # tables and rows of them


@dataclass(slots=True)
class RowJob:
    """One request's rows; `position` is -1 until it has a region of the ring."""

    session: int
    request: int
    wanted: Wanted  # as asked for, duplicates and all
    n_rows: int
    is_engines: bool  # else a reader's
    position: int = -1
    n_unread: int = 0  # batches that have not been read yet
    is_ready: bool = False
    is_given_up: bool = False  # done with, or its client is gone
    faults: list[RowFault] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows of one table, ascending and each once, and where in the ring they belong."""

    table: int
    rows: Integers
    positions: Integers  # in the ring, one for each row that was asked for
    index: Integers  # which of `rows` belongs there


def batches_of(
    job: RowJob, batch_rows: Sequence[int], absent: npt.NDArray[np.bool_] | None = None
) -> list[RowBatch]:
    """Return the rows of a job that has its region, or the `absent` ones, in batches.

    batch_rows  most rows of a batch, table by table
    absent      bool [n_rows] in the order asked for; None: all
    """
    batches: list[RowBatch] = []
    position = job.position
    for table, wanted in job.wanted:
        rows, positions = wanted, np.arange(position, position + len(wanted))
        if absent is not None:
            chosen = absent[position - job.position :][: len(wanted)]
            rows, positions = rows[chosen], positions[chosen]
        position += len(wanted)
        batches += _batches_of_table(table, rows, positions, batch_rows[table])
    return batches


def _batches_of_table(
    table: int, rows: npt.NDArray[np.uint32], positions: Integers, size: int
) -> list[RowBatch]:
    unique, index = np.unique(rows.astype(np.int64), return_inverse=True)
    order = np.argsort(index, kind="stable")
    cuts = np.searchsorted(index[order], np.arange(0, len(unique) + size, size))
    batches = []
    for number, first in enumerate(range(0, len(unique), size)):
        mine = order[cuts[number] : cuts[number + 1]]
        chosen = unique[first : first + size]
        batches.append(RowBatch(table, chosen, positions[mine], index[mine] - first))
    return batches
