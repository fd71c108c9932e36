"""A source that knows which of its reads have not returned, for commands that must end even then.

A read of a drive or a network that is gone may never return, and nothing ends its thread.
Invariants: who waits for the readers does so as long as each read returns within WAIT_S; the
readers' threads are daemonic, so that one that hangs holds back neither the wait nor the exit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from protocol.errors import ShardError
from protocol.files.safetensors_header import Shard

from .source import Bytes, FileSource, ReadKind

WAIT_S = 30.0  # for one read: a drive that mends itself takes some seconds
POLL_S = 0.2
CLOSE_S = 1.0


class _Read(NamedTuple):
    began: float
    shard: int
    offset: int
    n_bytes: int


class WatchedSource(FileSource):
    """Reads files past the page cache, by threads that are waited for in `wait`."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        super().__init__(shards, direct=True)
        self._running: dict[int, _Read] = {}  # by thread

    def read_into(self, shard: int, offset: int, memory: Bytes, kind: ReadKind) -> int:
        """Read at most len(memory) bytes and return how many; 0 at the end of the file."""
        thread = threading.get_ident()
        self._running[thread] = _Read(time.monotonic(), shard, offset, len(memory))
        try:
            return super().read_into(shard, offset, memory, kind)
        finally:
            del self._running[thread]

    def wait(self, threads: Sequence[threading.Thread]) -> None:
        """Wait until all have ended. Raises ShardError where a read does not return in WAIT_S."""
        for thread in threads:
            while thread.is_alive():
                thread.join(POLL_S)
                self._check()

    def close_after(self, threads: Sequence[threading.Thread]) -> None:
        """Close every descriptor once the threads have ended; leave them open where one hangs."""
        ends_at = time.monotonic() + CLOSE_S
        for thread in threads:
            thread.join(max(0.0, ends_at - time.monotonic()))
        if not any(thread.is_alive() for thread in threads):
            self.close()

    def _check(self) -> None:
        running = list(self._running.values())  # a copy at once: readers change it meanwhile
        if running and time.monotonic() - (first := min(running)).began > WAIT_S:
            raise ShardError(
                f"{self.path(first.shard)}: bytes {first.offset} to "
                f"{first.offset + first.n_bytes}: no answer from the drive in {WAIT_S:g} s"
            )
