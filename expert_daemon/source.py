"""Where bytes come from: the seam between the readers and the shards' files.

`Source` is what a test replaces to inject faults. `FileSource` reads the files: O_DIRECT where the
file system allows it, else through the page cache, from which it drops again what was read once.

Invariants: descriptors are opened once, read-only, and belong to the source until `close`. All
methods may be called from any thread.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from protocol.errors import ShardError
from protocol.files.safetensors_index import Shard

from .deep_reads import DeepReads, Integers, Reads
from .direct_io import open_direct
from .log import log

PAGE_BYTES = 4096

Bytes = npt.NDArray[np.uint8]


class ReadKind(Enum):
    """How a range is read, and what stays of it in the page cache."""

    DIRECT = "direct"  # O_DIRECT: offset, size and memory are multiples of the alignment
    BUFFERED = "buffered"  # through the page cache; dropped from it in direct mode
    CACHED = "cached"  # through the page cache, and left there (Engram rows)
    NOWAIT = "nowait"  # as CACHED, but only what is in the page cache; 0 where nothing is


@dataclass(frozen=True, slots=True)
class ManyReads:
    """Ranges to read DIRECT, all at once; parallel arrays."""

    shards: Integers
    offsets: Integers
    n_bytes: Integers
    places: Integers  # where each goes in the memory

    def __len__(self) -> int:
        return len(self.offsets)


class Source(Protocol):
    """Positional reads from numbered shards."""

    def path(self, shard: int) -> Path:
        """The shard's file, for messages."""
        ...

    def n_bytes(self, shard: int) -> int:
        """The file's size as it is now."""
        ...

    def alignment(self, shard: int) -> int:
        """Bytes to which a DIRECT read of the shard must be aligned; 1: read it BUFFERED."""
        ...

    def read_into(self, shard: int, offset: int, memory: Bytes, kind: ReadKind) -> int:
        """Read at most len(memory) bytes and return how many; 0 at the end of the file.

        A short count is no error. Raises OSError.
        """
        ...

    def read_many(self, reads: ManyReads, memory: Bytes) -> Integers:
        """Return what each read gave: a count as of `read_into`, or -errno. Raises nothing."""
        ...

    def close(self) -> None:
        """Close every descriptor."""
        ...


class FileSource:
    """The shards' files, each opened twice: for direct and for buffered reads."""

    def __init__(self, shards: Sequence[Shard], *, direct: bool) -> None:
        """Open all files; raises ShardError naming the one that cannot be opened."""
        self._shards = tuple(shards)
        self._drop = direct
        self._direct: list[int] = []
        self._buffered: list[int] = []
        self._cached: list[int] = []
        self._alignments: list[int] = []
        self._has_nowait = True
        self._deep = threading.local()
        self._has_deep = True
        self.n_direct_refused = 0
        for number, shard in enumerate(self._shards):
            try:
                self._open(shard.path, direct=direct)
            except OSError as error:
                raise ShardError(f"{shard.path}: cannot be opened: {error.strerror}") from error
            if direct and self._alignments[number] == 1:
                self._log_refused(number, "open")

    def _open(self, path: Path, *, direct: bool) -> None:
        opened = open_direct(path) if direct else None
        descriptor, alignment = opened if opened is not None else (-1, 1)
        self._direct.append(descriptor)
        self._alignments.append(alignment)
        self._buffered.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        self._cached.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        os.posix_fadvise(self._cached[-1], 0, 0, os.POSIX_FADV_RANDOM)

    def _log_refused(self, shard: int, where: str) -> None:
        self.n_direct_refused += 1
        if self.n_direct_refused == 1:
            log(f"{self.path(shard)}: O_DIRECT refused ({where}): reading through the page cache")

    def path(self, shard: int) -> Path:
        """The shard's file, for messages."""
        return self._shards[shard].path

    def n_bytes(self, shard: int) -> int:
        """The file's size as it is now."""
        return os.fstat(self._buffered[shard]).st_size

    def alignment(self, shard: int) -> int:
        """Bytes to which a DIRECT read of the shard must be aligned; 1: read it BUFFERED."""
        return self._alignments[shard]

    def read_into(self, shard: int, offset: int, memory: Bytes, kind: ReadKind) -> int:
        """Read at most len(memory) bytes and return how many; 0 at the end of the file."""
        if kind is ReadKind.DIRECT:
            return self._read_direct(shard, offset, memory)
        if kind is ReadKind.NOWAIT:
            return self._read_nowait(shard, offset, memory)
        if kind is ReadKind.CACHED:
            return os.preadv(self._cached[shard], [memory.data], offset)
        return self._read_buffered(shard, offset, memory)

    def read_many(self, reads: ManyReads, memory: Bytes) -> Integers:
        """Return what each read gave: a count as of `read_into`, or -errno. Raises nothing."""
        deep = self._deep_reads()
        if deep is None:
            return read_one_by_one(self, reads, memory)
        descriptors = np.array(self._direct)[reads.shards]
        addresses = memory.__array_interface__["data"][0] + reads.places
        results = deep.read(Reads(descriptors, reads.offsets, reads.n_bytes, addresses))
        if (results == -errno.EINVAL).any():
            return read_one_by_one(self, reads, memory)
        return results

    def _deep_reads(self) -> DeepReads | None:
        """This thread's queue; it stays for as long as the process."""
        deep: DeepReads | None = getattr(self._deep, "reads", None)
        if deep is None and self._has_deep:
            try:
                deep = self._deep.reads = DeepReads()
            except OSError as error:
                self._has_deep = False
                log(f"no asynchronous reads ({error.strerror}): Engram rows come one by one")
        return deep

    def _read_direct(self, shard: int, offset: int, memory: Bytes) -> int:
        try:
            return os.preadv(self._direct[shard], [memory.data], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        if self._alignments[shard] != 1:
            self._alignments[shard] = 1
            self._log_refused(shard, "read")
        return self._read_buffered(shard, offset, memory)

    def _read_buffered(self, shard: int, offset: int, memory: Bytes) -> int:
        n_bytes = os.preadv(self._buffered[shard], [memory.data], offset)
        if self._drop:
            first = offset // PAGE_BYTES * PAGE_BYTES
            last = -(-(offset + n_bytes) // PAGE_BYTES) * PAGE_BYTES
            os.posix_fadvise(self._buffered[shard], first, last - first, os.POSIX_FADV_DONTNEED)
        return n_bytes

    def _read_nowait(self, shard: int, offset: int, memory: Bytes) -> int:
        if not self._has_nowait:
            return 0
        try:
            return os.preadv(self._cached[shard], [memory.data], offset, os.RWF_NOWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            self._has_nowait = False
            return 0

    def close(self) -> None:
        """Close every descriptor."""
        for descriptor in self._direct + self._buffered + self._cached:
            if descriptor >= 0:
                os.close(descriptor)
        self._direct, self._buffered, self._cached = [], [], []


def read_one_by_one(source: Source, reads: ManyReads, memory: Bytes) -> Integers:
    """Serve `read_many` with a `read_into` each."""
    results = np.zeros(len(reads), np.int64)
    columns = (reads.shards, reads.offsets, reads.n_bytes, reads.places)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for index, (shard, offset, n_bytes, place) in enumerate(rows):
        try:
            window = memory[place : place + n_bytes]
            results[index] = source.read_into(shard, offset, window, ReadKind.DIRECT)
        except OSError as error:
            results[index] = -(error.errno or errno.EIO)
    return results
