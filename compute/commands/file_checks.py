"""Files read whole by several threads, their 1 MiB parts hashed: the work of `headrace verify`.

Invariants: every byte of a checked file belongs to exactly one job. A part that cannot be read is a
fault that names it, and the rest is read on; a read that does not return ends everything. Jobs
alternate between drives.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protocol.files.pack_format import PART_BYTES, part_hashes
from protocol.files.safetensors_header import Shard

JOB_BYTES = 4 << 20
MAX_ALIGNMENT = 1 << 16

Hashes = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that is not as it should be."""

    path: Path
    text: str
    offset: int = 0
    n_bytes: int = 0
    layer: int = -1
    expert: int = -1

    def __str__(self) -> str:
        key = f"layer {self.layer} expert {self.expert}: " if self.expert >= 0 else ""
        place = f", bytes {self.offset} to {self.offset + self.n_bytes}" if self.n_bytes else ""
        return f"{key}{self.path}{place}: {self.text}"


class CheckedFile:
    """A file and its parts: `regions` of (offset, bytes), each cut into parts of 1 MiB.

    judge(found) is called at the end with the hashes of all parts, in order, and a flag of those
    that were read; it returns the faults.
    """

    def __init__(
        self,
        shard: Shard,
        regions: Sequence[tuple[int, int]],
        judge: Callable[[CheckedFile], list[Fault]],
    ) -> None:
        self.shard = shard
        self.regions = tuple(regions)
        self.judge = judge
        counts = [-(-n_bytes // PART_BYTES) for _, n_bytes in regions]
        self._first_parts = np.cumsum([0, *counts]).tolist()
        self.found: Hashes = np.zeros(self._first_parts[-1], np.uint64)
        self.unread: list[tuple[int, str]] = []  # part, why

    @property
    def n_bytes(self) -> int:
        """Bytes that will be read."""
        return sum(n_bytes for _, n_bytes in self.regions)

    def jobs(self) -> Iterator[tuple[CheckedFile, int, int, int]]:
        """Yield (this, first part, offset, bytes) of what is read at once."""
        for (offset, n_bytes), first in zip(self.regions, self._first_parts, strict=False):
            for start in range(0, n_bytes, JOB_BYTES):
                size = min(JOB_BYTES, n_bytes - start)
                yield self, first + start // PART_BYTES, offset + start, size

    def part_span(self, part: int) -> tuple[int, int, int]:
        """Return (region, file offset, bytes) of a part."""
        region = int(np.searchsorted(self._first_parts, part, side="right")) - 1
        offset, n_bytes = self.regions[region]
        start = (part - self._first_parts[region]) * PART_BYTES
        return region, offset + start, min(PART_BYTES, n_bytes - start)

    def unread_faults(self) -> list[Fault]:
        """Return a fault for each part that could not be read."""
        return [
            Fault(self.shard.path, text, *self.part_span(part)[1:]) for part, text in self.unread
        ]


class FileChecks:
    """Reads and hashes files with `n_threads` threads; `on_bytes` is called by all of them."""

    def __init__(self, files: Sequence[CheckedFile], on_bytes: Callable[[int], None]) -> None:
        from expert_daemon.range_reader import RangeReader, ReadFailure
        from expert_daemon.watched_source import WatchedSource

        self._files = list(files)
        self._on_bytes = on_bytes
        self._numbers = {id(file): number for number, file in enumerate(self._files)}
        self._source = WatchedSource([file.shard for file in self._files])
        self._ranges = RangeReader(self._source)
        self._jobs = _alternating(self._files)
        self._lock = threading.Lock()
        self._unreadable = ReadFailure
        self._failure: BaseException | None = None
        self._stop = False

    def run(self, n_threads: int) -> list[Fault]:
        """Return every fault, in the order of the files.

        Raises ShardError naming the range whose read does not return.
        """
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(n_threads)]
        for thread in threads:
            thread.start()
        try:
            self._source.wait(threads)
        finally:
            self._stop = True
            self._source.close_after(threads)
        if self._failure is not None:
            raise self._failure
        return [fault for file in self._files for fault in file.judge(file)]

    def _work(self) -> None:
        from expert_daemon.direct_io import aligned_buffer

        buffer = aligned_buffer(JOB_BYTES + MAX_ALIGNMENT)
        try:
            while not self._stop:
                with self._lock:
                    job = next(self._jobs, None)
                if job is None:
                    return
                self._run(*job, buffer)
                self._on_bytes(job[3])
        except BaseException as failure:  # noqa: BLE001 - handed to the thread that waits
            self._failure = failure
            self._stop = True

    def _run(
        self, file: CheckedFile, first: int, offset: int, n_bytes: int, buffer: NDArray[np.uint8]
    ) -> None:
        try:
            self._read(file, offset, n_bytes, buffer)
        except self._unreadable:
            for start in range(0, n_bytes, PART_BYTES):  # find out which parts are unreadable
                part, size = first + start // PART_BYTES, min(PART_BYTES, n_bytes - start)
                try:
                    self._read(file, offset + start, size, buffer)
                    file.found[part : part + 1] = part_hashes(buffer[:size])
                except self._unreadable as failure:
                    with self._lock:
                        file.unread.append((part, failure.text))
            return
        hashes = part_hashes(buffer[:n_bytes])
        file.found[first : first + len(hashes)] = hashes

    def _read(
        self, file: CheckedFile, offset: int, n_bytes: int, buffer: NDArray[np.uint8]
    ) -> None:
        number = self._numbers[id(file)]
        align = self._source.alignment(number)
        window = buffer[: -(-n_bytes // align) * align]
        self._ranges.read_range(number, offset, window, n_bytes=n_bytes, align=align)


def whole_file(shard: Shard) -> list[tuple[int, int]]:
    """Return the regions of a file that is read from end to end."""
    return [(0, shard.n_bytes)] if shard.n_bytes else []


def _alternating(files: Sequence[CheckedFile]) -> Iterator[tuple[CheckedFile, int, int, int]]:
    """Yield the jobs of all files, a drive's after another's."""
    drives: dict[int, list[CheckedFile]] = defaultdict(list)
    for file in files:
        drives[file.shard.path.stat().st_dev].append(file)
    queues = [(job for file in group for job in file.jobs()) for group in drives.values()]
    for turn in zip_longest(*queues):
        yield from (job for job in turn if job is not None)
