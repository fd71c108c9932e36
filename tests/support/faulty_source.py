"""A source that fails as drives do: the test double at the reader's seam."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from expert_daemon.deep_reads import Integers
from expert_daemon.source import Bytes, ManyReads, ReadKind, Source, read_one_by_one

Rule = Callable[[int, int, int], bool]  # shard, offset, bytes -> whether the fault strikes


def overlaps(shard: int, offset: int, n_bytes: int) -> Rule:
    """A rule that strikes every read of a byte in this range."""
    return lambda s, o, n: s == shard and o < offset + n_bytes and o + n > offset


@dataclass
class Faults:
    """What goes wrong; may be changed while the daemon runs."""

    eio: Rule | None = None
    eio_times: int = -1  # how often it strikes; -1: for ever
    short: int = 0  # most bytes that a read returns; 0: all
    wrong: Rule | None = None  # a byte in the middle comes out inverted
    wrong_times: int = -1
    stuck: Rule | None = None  # the read waits until `unstick`: it never returns
    stuck_times: int = -1
    delay: float = 0.0  # seconds before each read
    late: Callable[[int, int, int], float] | None = None  # seconds before one read
    shuffle: random.Random | None = None  # delays of random length, so that reads end in any order
    unstick: threading.Event = field(default_factory=threading.Event)


class FaultySource:
    """Wraps a source; counts the reads and bytes that went through."""

    def __init__(self, source: Source, faults: Faults | None = None) -> None:
        self.source = source
        self.faults = faults or Faults()
        self.n_reads = 0
        self.n_bytes_read = 0
        self._lock = threading.Lock()

    def path(self, shard: int) -> Path:
        return self.source.path(shard)

    def n_bytes(self, shard: int) -> int:
        return self.source.n_bytes(shard)

    def alignment(self, shard: int) -> int:
        return self.source.alignment(shard)

    def read_into(self, shard: int, offset: int, memory: Bytes, kind: ReadKind) -> int:
        faults = self.faults
        n_bytes = len(memory)
        if kind is ReadKind.NOWAIT:
            return 0
        if self._strikes(faults.stuck, "stuck_times", shard, offset, n_bytes):
            faults.unstick.wait()
        late = faults.late(shard, offset, n_bytes) if faults.late is not None else 0.0
        if faults.delay + late:
            time.sleep(faults.delay + late)
        if faults.shuffle is not None:
            time.sleep(faults.shuffle.random() * 0.003)
        if self._strikes(faults.eio, "eio_times", shard, offset, n_bytes):
            raise OSError(errno.EIO, "injected")
        if faults.short and n_bytes > faults.short:
            memory = memory[: faults.short]
            kind = ReadKind.BUFFERED
        count = self.source.read_into(shard, offset, memory, kind)
        with self._lock:
            self.n_reads += 1
            self.n_bytes_read += count
        if count and self._strikes(faults.wrong, "wrong_times", shard, offset, n_bytes):
            memory[count // 2] ^= 0xFF
        return count

    def read_many(self, reads: ManyReads, memory: Bytes) -> Integers:
        return read_one_by_one(self, reads, memory)

    def _strikes(self, rule: Rule | None, times: str, shard: int, offset: int, n: int) -> bool:
        if rule is None or not rule(shard, offset, n):
            return False
        with self._lock:
            left: int = getattr(self.faults, times)
            if left == 0:
                return False
            setattr(self.faults, times, left - 1 if left > 0 else left)
        return True

    def close(self) -> None:
        self.source.close()
