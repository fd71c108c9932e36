"""Which units of one output were written, with their hashes: appended to, never rewritten.

An entry is one append of fixed layout with a hash of its own, so that a torn one is seen and left
out. An entry says what was written, not that it reached the drive: whoever resumes reads the bytes
back and compares the hashes.
"""

from __future__ import annotations

import os
import struct
import threading
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protocol.files.pack_format import hash_bytes

Hashes = NDArray[np.uint64]

_HEAD = struct.Struct("<II")  # unit, number of hashes
_TAIL_BYTES = 8
_HASHES_MAX = 1 << 22


class Journal:
    """Unit number -> hashes; the last entry of a unit counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        data = path.read_bytes() if path.exists() else b""
        self._entries, end = _parse(data)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._descriptor, end)
        os.lseek(self._descriptor, end, os.SEEK_SET)

    def get(self, unit: int) -> Hashes | None:
        """Return the hashes of a unit that was written, else None."""
        return self._entries.get(unit)

    def add(self, unit: int, hashes: Hashes) -> None:
        """Note a unit whose bytes have been written."""
        body = _HEAD.pack(unit, len(hashes)) + hashes.astype("<u8").tobytes()
        entry = body + hash_bytes(body).to_bytes(_TAIL_BYTES, "little")
        with self._lock:
            view = memoryview(entry)
            while view:
                view = view[os.write(self._descriptor, view) :]
            self._entries[unit] = hashes

    def close(self) -> None:
        """Close the file; it stays."""
        os.close(self._descriptor)

    def remove(self) -> None:
        """Close and delete the file: the output is finished and noted elsewhere."""
        self.close()
        self._path.unlink()


def _parse(data: bytes) -> tuple[dict[int, Hashes], int]:
    """Return the whole entries and where the last one ends; what follows a torn one is lost."""
    entries: dict[int, Hashes] = {}
    at = 0
    while at + _HEAD.size <= len(data):
        unit, count = _HEAD.unpack_from(data, at)
        stop = at + _HEAD.size + 8 * count
        if count > _HASHES_MAX or stop + _TAIL_BYTES > len(data):
            break
        found = hash_bytes(data[at:stop])
        if found != int.from_bytes(data[stop : stop + _TAIL_BYTES], "little"):
            break
        entries[unit] = np.frombuffer(data, "<u8", count, at + _HEAD.size).astype(np.uint64)
        at = stop + _TAIL_BYTES
    return entries, at
