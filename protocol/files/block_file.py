"""Files of checked blocks that are appended to: which blocks are whole, and what is not.

Pure. A block that is cut short or damaged is passed over; the next whole one is found by its magic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WholeBlocks(Generic[T]):
    """What a file's bytes held."""

    blocks: list[T]
    end: int  # where the last whole block ends: a writer goes on there
    n_bytes_skipped: int  # damaged, between whole blocks
    n_bytes_torn: int  # behind the last whole block


class Lossy(Protocol):
    """What counts the bytes that were left out, as `WholeBlocks` does."""

    @property
    def n_bytes_skipped(self) -> int:
        """Damaged, between whole blocks."""
        ...

    @property
    def n_bytes_torn(self) -> int:
        """Behind the last whole block."""
        ...


def whole_blocks(
    data: bytes, start: int, magic: bytes, block_at: Callable[[int], tuple[T, int] | None]
) -> WholeBlocks[T]:
    """Read the blocks of a whole file's bytes from `start` on.

    block_at  gives what the block at a place holds and where it ends, None where none is whole
    """
    blocks: list[T] = []
    place = end = start
    skipped = 0
    while place < len(data):
        found = block_at(place)
        if found is None:
            following = data.find(magic, place + 1)
            place = len(data) if following < 0 else following
            continue
        skipped += place - end
        blocks.append(found[0])
        place = end = found[1]
    return WholeBlocks(blocks, end, skipped, len(data) - end)


def losses(path: Path, found: Lossy) -> list[str]:
    """Return what was left out of a file, a line each."""
    notes = []
    if found.n_bytes_skipped:
        notes.append(f"{path}: {found.n_bytes_skipped} damaged bytes left out")
    if found.n_bytes_torn:
        notes.append(f"{path}: {found.n_bytes_torn} bytes at the end are no whole block")
    return notes
