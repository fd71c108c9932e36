"""Experts from their shards into slots, by plain threads, checked by their checksum.

`ExpertReader.submit` and `cancel` are called on the loop's thread, the reading is done by
ReaderThreads, and results come back through `drain` after `wake` was called once.

Invariants: a read that was submitted gives exactly one result, after its last system call has
returned; until then its slot is written to. A read whose checksum is not the key's is repeated once
before it fails. Where the key has a second copy, in a mirror, a read that failed goes on there; it
has failed when both have.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from protocol.wire.limits import MAX_TEXT

from .checksums import Checksums, slot_checksum
from .copies import HOME, Copies
from .log import log
from .prefix_hash import PrefixHash
from .range_reader import RangeReader, ReadFailure
from .read_plan import DEFAULT_SHAPE, Fragment, Part, ReadShape, plan_parts
from .reader_threads import Lane, ReaderThreads
from .slot_hash import SlotHash
from .source import Bytes

Key = tuple[int, int]  # layer, expert

AT_ONCE = 4  # parts of one expert that somebody waits for: those before them are hashed meanwhile


@dataclass(frozen=True, slots=True)
class CopyFault:
    """What was wrong with one copy of an expert."""

    copy: int
    code: str
    text: str


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
    copy: int  # which was read last
    faults: tuple[CopyFault, ...]  # of the copies that were read


class ExpertRead:
    """One expert's read under way; the loop's thread may look at key, slot, lane and generation."""

    __slots__ = (
        "address",
        "begun",
        "cancelled",
        "claimed",
        "copies",
        "copy",
        "failure",
        "faults",
        "generation",
        "hashes_early",
        "hashing",
        "is_repeated",
        "key",
        "lane",
        "memory",
        "n_unfinished",
        "n_whole",
        "order",
        "parts",
        "prefix",
        "slot",
        "started",
    )

    def __init__(
        self, key: Key, slot: int, generation: int, *, lane: Lane, memory: Bytes, parts: list[Part]
    ) -> None:
        self.key = key
        self.slot = slot
        self.generation = generation
        self.lane = lane
        self.cancelled = False
        self.memory = memory
        self.address = int(memory.__array_interface__["data"][0])
        self.set_parts(parts)
        self.failure: ReadFailure | None = None
        self.hashes_early = lane.is_urgent  # while parts arrive, else once all have
        self.prefix: PrefixHash | None = None  # from the first part on, then
        self.hashing: SlotHash | None = None  # in an idle lane, once every part has been read
        self.is_repeated = False
        self.copy = HOME  # that is being read
        self.copies: list[int] = []  # that were not tried yet
        self.faults: list[CopyFault] = []
        self.n_whole = 0  # how often all of it was read
        self.started = time.monotonic_ns()

    def set_parts(self, parts: list[Part]) -> None:
        """Have all of these to read, none of them begun."""
        self.parts = parts
        self.claimed = bytearray(len(parts))
        self.begun = [0] * len(parts)  # when a thread began each part [ns], 0: not now
        self.n_unfinished = len(parts)
        firsts = [part.first_place for part in parts]
        self.order = sorted(range(len(parts)), key=firsts.__getitem__)  # that of the hashing

    def claim(self) -> int | None:
        """Take the next part that no thread has begun; the caller holds the reader's lock."""
        for number in self.order:
            if not self.claimed[number]:
                self.claimed[number] = 1
                return number
        return None

    def longest_ns(self, now: int) -> int:
        """How long the part that has been read for longest is being read now."""
        return max((now - begun for begun in self.begun if begun), default=0)


class ExpertReader:
    """Reads experts into slots with ReaderThreads; results by `drain`, announced by `wake`."""

    def __init__(
        self,
        threads: ReaderThreads,
        ranges: RangeReader,
        fragments_of: Callable[[Key], list[Fragment]],
        pieces: Sequence[Sequence[tuple[int, int]]],
        wake: Callable[[], None],
        checksums: Checksums,
        shape: ReadShape = DEFAULT_SHAPE,
        mirror_of: Callable[[Key], list[Fragment]] = lambda _: [],
    ) -> None:
        """Take the places of a key's slices, and each layer's pieces: (slot offset, bytes).

        mirror_of  where else the same bytes are, empty where nowhere
        """
        self._threads = threads
        self._ranges = ranges
        self.copies = Copies(fragments_of, mirror_of)
        self._pieces = [[piece for piece in layer if piece[1]] for layer in pieces]
        self._expert_bytes = [sum(n_bytes for _, n_bytes in layer) for layer in pieces]
        self._wake = wake
        self._awake = False
        self._results: deque[ReadResult] = deque()
        self._lock = threading.Lock()
        self.checksums = checksums
        self._shape = shape
        self.n_in_flight = 0
        self.n_checksum_retries = 0
        self.n_fallbacks = 0  # reads that went on with the other copy

    def place(self, key: Key, copy: int = HOME) -> tuple[str, int]:
        """(file, offset) of a copy's first byte, for messages."""
        first = plan_parts(self.copies.fragments(key, copy))[0]
        return str(self._ranges.source.path(first.shard)), first.start

    def submit(
        self,
        key: Key,
        slot: int,
        generation: int,
        memory: Bytes,
        lane: Lane = Lane.DEMAND,
        *,
        last: int | None = None,
    ) -> ExpertRead:
        """Begin to read `key` into `memory`, u8 [slot_bytes], the slot's own bytes.

        In idle lanes by small parts: what is begun of them is what a demand waits behind.
        last  the copy to leave for the end, where there are two: its drive is slow
        """
        copy, *others = self.copies.order(key, self._expert_bytes[key[0]], last=last)
        parts = self._parts(key, copy, lane)
        read = ExpertRead(key, slot, generation, lane=lane, memory=memory, parts=parts)
        read.copy, read.copies = copy, others
        self.n_in_flight += 1
        self._submit_parts(read, lane)
        return read

    def raise_lane(self, read: ExpertRead, lane: Lane) -> None:
        """Let the parts that no thread has begun be read with a more urgent lane's."""
        if lane >= read.lane:
            return
        with self._lock:
            read.lane = lane
            is_hashing = read.hashing is not None
        self._submit_parts(read, lane)
        if is_hashing:
            self._threads.submit(lane, partial(self._hash_on, read))

    def cancel(self, read: ExpertRead) -> None:
        """Leave out the parts that no thread has begun; the result comes when the others ended."""
        read.cancelled = True
        with self._lock:
            n_left_out = read.claimed.count(0)
            read.claimed = bytearray(b"\1" * len(read.parts))
            read.n_unfinished -= n_left_out
            if n_left_out:
                failure = ReadFailure("CANCELLED", "cancelled before it was read")
                read.failure = read.failure or failure
            is_last = n_left_out > 0 and read.n_unfinished == 0
        if is_last:
            self._finish(read)

    def order(self, key: Key) -> tuple[int, int]:
        """(shard, offset) of a key's first byte: ascending is the order of the files."""
        return min((part.shard, part.offset) for part in self.copies.fragments(key))

    def drain(self) -> list[ReadResult]:
        """Return the results that have come since the last call."""
        self._awake = False
        results = []
        while self._results:
            results.append(self._results.popleft())
        self.n_in_flight -= len(results)
        return results

    def _parts(self, key: Key, copy: int, lane: Lane) -> list[Part]:
        fragments = self.copies.fragments(key, copy)
        return plan_parts(fragments, self._shape, small=not lane.is_urgent)

    def _submit_parts(self, read: ExpertRead, lane: Lane) -> None:
        n_unclaimed = read.claimed.count(0)
        n_begun = min(n_unclaimed, AT_ONCE) if lane.is_urgent else n_unclaimed
        work = partial(self._run_part, read, lane)
        for _ in range(n_begun):
            self._threads.submit(lane, work)

    def _prefix_of(self, read: ExpertRead) -> PrefixHash:
        with self._lock:
            if read.prefix is None:
                pieces = self._pieces[read.key[0]]
                read.prefix = PrefixHash(read.memory, read.parts, pieces)
            return read.prefix

    def _run_part(self, read: ExpertRead, lane: Lane, bounce: Bytes) -> None:
        """Read the next part; in an urgent lane this thread goes on with the one after it."""
        with self._lock:
            number = read.claim()
        if number is None:
            return
        failure: ReadFailure | None = None
        if read.failure is None and not read.cancelled:
            failure = self._read_part(read, number, bounce)
        elif read.failure is None:
            failure = ReadFailure("CANCELLED", "cancelled before it was read")
        with self._lock:
            read.failure = read.failure or failure
            read.n_unfinished -= 1
            is_last = read.n_unfinished == 0
            goes_on = lane.is_urgent and 0 in read.claimed
        if goes_on:
            self._threads.go_on(lane, partial(self._run_part, read, lane))
        if is_last:
            self._finish(read)

    def _read_part(self, read: ExpertRead, number: int, bounce: Bytes) -> ReadFailure | None:
        part, rates = read.parts[number], self.copies.rates
        n_bytes = part.stop - part.start
        began = read.begun[number] = time.monotonic_ns()
        shown = partial(self._show, read, number) if read.hashes_early else None
        try:
            self._ranges.read_part(part, read.memory, read.address, bounce, shown)
        except ReadFailure as failure:
            rates.note_failed(read.copy, n_bytes, time.monotonic_ns() - began)
            return failure
        finally:
            read.begun[number] = 0
        rates.note(read.copy, n_bytes, time.monotonic_ns() - began)
        if read.hashes_early:
            self._prefix_of(read).arrived(number)
        return None

    def _show(self, read: ExpertRead, number: int, window: Bytes, first: int) -> None:
        self._prefix_of(read).offer(number, window, first)

    def _finish(self, read: ExpertRead) -> None:
        pieces = self._pieces[read.key[0]]
        if read.failure is not None:
            self._conclude(read, 0)
        elif read.hashes_early:
            self._conclude(read, self._prefix_of(read).finish())
        elif read.lane.is_urgent:
            self._conclude(read, slot_checksum(read.memory, pieces))
        else:
            read.hashing = SlotHash(read.memory, pieces)
            self._hash_on(read)

    def _hash_on(self, read: ExpertRead, _bounce: Bytes | None = None) -> None:
        """Hash a step in an idle lane, then wait there again; all of it once somebody waits."""
        with self._lock:
            hashing = read.hashing
            if hashing is None or hashing.is_busy:
                return
            hashing.is_busy = True
        while not hashing.step():
            with self._lock:
                lane = read.lane
                hashing.is_busy = lane.is_urgent
            if not lane.is_urgent:
                self._threads.submit(lane, partial(self._hash_on, read))
                return
        read.hashing = None
        self._conclude(read, hashing.checksum)

    def _conclude(self, read: ExpertRead, checksum: int) -> None:
        if read.failure is None:
            read.n_whole += 1
            known = self.checksums.learn(*read.key, checksum)
            if checksum != known:
                if not read.is_repeated:
                    self._repeat(read)
                    return
                first = read.parts[0]
                read.failure = ReadFailure(
                    "CHECKSUM",
                    f"{self._ranges.source.path(first.shard)}: bytes from {first.start} on have "
                    f"checksum {checksum:016x}, wanted {known:016x}, read twice",
                )
        failure = read.failure
        if failure is not None and failure.code != "CANCELLED":
            read.faults.append(CopyFault(read.copy, failure.code, failure.text))
            self.copies.note_failed(read.key, read.copy)
            if read.copies and not read.cancelled:
                self._go_on_elsewhere(read, failure)
                return
        self._results.append(self._result(read, checksum))
        if not self._awake:
            self._awake = True
            self._wake()

    def _repeat(self, read: ExpertRead) -> None:
        self.n_checksum_retries += 1
        read.is_repeated = True
        self._begin_again(read, read.parts)

    def _go_on_elsewhere(self, read: ExpertRead, failure: ReadFailure) -> None:
        log(f"layer {read.key[0]} expert {read.key[1]}: {failure.text}; trying its other copy")
        self.n_fallbacks += 1
        read.failure = None
        read.is_repeated = False
        read.copy = read.copies.pop(0)
        self._begin_again(read, self._parts(read.key, read.copy, read.lane))

    def _begin_again(self, read: ExpertRead, parts: list[Part]) -> None:
        with self._lock:
            read.set_parts(parts)
            read.hashes_early, read.prefix = read.lane.is_urgent, None
        self._submit_parts(read, read.lane)

    def _result(self, read: ExpertRead, checksum: int) -> ReadResult:
        layer, expert = read.key
        code, text = _verdict(read)
        return ReadResult(
            key=read.key,
            slot=read.slot,
            generation=read.generation,
            code=code,
            text=f"layer {layer} expert {expert}: {text}"[:MAX_TEXT] if code else "",
            checksum=checksum,
            n_bytes=0 if code else self._expert_bytes[layer] * read.n_whole,
            read_ns=time.monotonic_ns() - read.started,
            copy=read.copy,
            faults=tuple(read.faults),
        )


def _verdict(read: ExpertRead) -> tuple[str, str]:
    """Return code and text of a read that has ended: CHECKSUM only where no copy may be good."""
    if read.failure is None:
        return "", ""
    if read.failure.code == "CANCELLED":
        return read.failure.code, read.failure.text
    codes = [fault.code for fault in read.faults if fault.code != "CHECKSUM"]
    return (codes or ["CHECKSUM"])[0], "; ".join(fault.text for fault in read.faults)
