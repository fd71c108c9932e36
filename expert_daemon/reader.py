"""Experts from their shards into slots, by plain threads, checked by their checksum.

`ExpertReader.submit` and `cancel` are called on the loop's thread, the reading is done by
ReaderThreads, and results come back through `drain` after `wake` was called once.

Invariants: a read that was submitted gives exactly one result, after its last system call has
returned; until then its slot is written to. Checksums of what was read first are kept, and a later
read that differs is repeated once before it fails.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from .range_reader import MAX_WINDOW_BYTES, RangeReader, ReadFailure
from .read_plan import Fragment, Part, plan_parts
from .reader_threads import Lane, ReaderThreads
from .source import Bytes

Key = tuple[int, int]  # layer, expert


@dataclass(frozen=True, slots=True)
class ReadResult:
    """How one read ended; `code` is empty where the slot holds the expert's checked bytes."""

    key: Key
    slot: int
    generation: int
    code: str
    text: str
    checksum: int
    n_bytes: int
    read_ns: int


class ExpertRead:
    """One expert's read under way; the loop's thread may look at key, slot, lane and generation."""

    __slots__ = ("_address", "_attempt", "_claimed", "_failure", "_memory", "_parts", "_started",
                 "_unfinished", "cancelled", "generation", "key", "lane", "slot")  # fmt: skip

    def __init__(
        self, key: Key, slot: int, generation: int, lane: Lane, memory: Bytes, parts: list[Part]
    ) -> None:
        self.key = key
        self.slot = slot
        self.generation = generation
        self.lane = lane
        self.cancelled = False
        self._memory = memory
        self._address = int(memory.__array_interface__["data"][0])
        self._parts = parts
        self._claimed = bytearray(len(parts))
        self._unfinished = len(parts)
        self._failure: ReadFailure | None = None
        self._attempt = 0
        self._started = time.monotonic_ns()
