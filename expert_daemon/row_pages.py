"""Which pages of a shard hold the wanted rows of a column. Pure.

Each page is read once, whichever rows share it; pages that touch are one read.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

PAGES_AT_ONCE = 16  # of one read, or some more for its last row


class PageReads(NamedTuple):
    """Reads in ascending order of the file, which go into a buffer one after the other."""

    offsets: Integers  # in the file, multiples of a page
    n_bytes: Integers  # multiples of a page
    needed: Integers  # bytes that must have come; the file may end before the last page does
    places: Integers  # in the buffer
    row_read: Integers  # of each row, which read it is in
    row_places: Integers  # of each row, where it begins in the buffer
    end: int  # bytes of the buffer that are used


def plan_page_reads(starts: Integers, width: int, page: int, place: int = 0) -> PageReads:
    """Return reads of rows of `width` bytes at ascending offsets `starts`, none twice.

    place  where in the buffer to begin, a multiple of a page
    """
    first = starts // page
    last = (starts + (width - 1)) // page
    is_apart = first[1:] > last[:-1] + 1
    is_far = first[1:] // PAGES_AT_ONCE != first[:-1] // PAGES_AT_ONCE
    begins = np.concatenate(([0], np.flatnonzero(is_apart | is_far) + 1))
    ends = np.append(begins[1:], len(starts)) - 1
    offsets = first[begins] * page
    n_bytes = (last[ends] + 1) * page - offsets
    stops = place + np.cumsum(n_bytes)
    places = stops - n_bytes
    row_read = np.repeat(np.arange(len(begins)), ends - begins + 1)
    return PageReads(
        offsets=offsets,
        n_bytes=n_bytes,
        needed=starts[ends] + width - offsets,
        places=places,
        row_read=row_read,
        row_places=starts - offsets[row_read] + places[row_read],
        end=int(stops[-1]),
    )


def most_bytes(n_rows: int, width: int, page: int) -> int:
    """Return the bytes of buffer that reads of so many rows may need."""
    return n_rows * (-(-width // page) + 1) * page
