"""Where bytes come from: the seam between the readers and the shards' files.

`Source` is what a test replaces to inject faults. `FileSource` reads the files: O_DIRECT where the
file system allows it, else through the page cache, from which it drops again what was read once.

Invariants: descriptors are opened once, read-only, and belong to the source until `close`. All
methods may be called from any thread.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from protocol.errors import ShardError
from protocol.files.safetensors_index import Shard

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
