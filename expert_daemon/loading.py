"""The slot cache with its reads: what it asks for is read, what was read is told to it.

Runs on the loop's thread.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from .arena import Arena
from .cache import SlotCache
from .copies import HOME, MIRROR
from .log import log
from .metrics import Counters
from .outcome import FetchAnswer, Load, Purpose, WindowAnswer
from .read_faults import ReadFaults
from .read_times import ReadTimes
from .reader import ExpertRead, ExpertReader, ReadResult
from .reader_threads import Lane
from .suspects import Suspects

SLOW_READ_NS = 2_000_000_000  # of one part, on the drive: then it is read into another slot too
LOST_READ_NS = 20_000_000_000  # then it is waited for no longer, before the engine's own deadline
MAX_LINES = 4
LANES = {
    Purpose.DEMAND: Lane.DEMAND,
    Purpose.FETCH: Lane.FETCH,
    Purpose.AHEAD: Lane.IDLE,
    Purpose.WARM: Lane.IDLE,
    Purpose.HINT: Lane.PREFETCH,
}


@dataclass(slots=True)
class WindowReads:
    """What was read for the newest MissRequest, for its answer."""

    n_bytes: int = 0
    first_ns: int = 0
    last_ns: int = 0

    @property
    def read_ms(self) -> float:
        """From the first submission to the last completion."""
        return (self.last_ns - self.first_ns) / 1e6

    def clear(self) -> None:
        """Begin anew, for the next part of an answer."""
        self.n_bytes = self.first_ns = self.last_ns = 0


@dataclass(slots=True)
class UnderWay:
    """A load and the read that serves it."""

    load: Load
    read: ExpertRead
    is_slow: bool = False
    is_hedge: bool = False
    is_lost: bool = False


class ExpertLoading:
    """Starts the loads that fall due in `cache` and finishes them there."""

    def __init__(
        self,
        cache: SlotCache,
        reader: ExpertReader,
        arena: Arena,
        counters: Counters,
        faults: ReadFaults,
        suspects: Suspects,
        max_hedges: int,
    ) -> None:
        self.cache = cache
        self.faults = faults
        self.suspects = suspects
        self._hedged: set[tuple[int, int]] = set()  # keys that have or had a second read
        self._max_hedges = max_hedges
        self._reader = reader
        self._arena = arena
        self._counters = counters
        self._under_way: dict[tuple[int, int], UnderWay] = {}
        self.window = WindowReads()
        self._ahead_bytes = 0
        self.read_times = ReadTimes()

    def settle(self) -> tuple[list[WindowAnswer], list[FetchAnswer]]:
        """Start what fell due; return the answers that did."""
        self.suspects.give_up_damaged()
        answers: list[WindowAnswer] = []
        fetches: list[FetchAnswer] = []
        while True:
            due = self.cache.drain()
            answers += due.answers
            fetches += due.fetches
            for load in due.loads:
                self._start(load)
            for load in due.promoted:
                under_way = self._under_way.get((load.slot, load.generation))
                if under_way is not None:
                    self._reader.raise_lane(under_way.read, LANES[load.purpose])
            for load in due.unwanted:
                under_way = self._under_way.get((load.slot, load.generation))
                if under_way is not None:
                    self._reader.cancel(under_way.read)
            if not due.loads:
                return answers, fetches

    def _start(self, load: Load) -> None:
        objection = self.cache.objection(load)
        if objection is not None:
            self.cache.fail(load, *objection)
            return
        self._read(load, LANES[load.purpose])

    def _read(self, load: Load, lane: Lane, *, hedged: ExpertRead | None = None) -> None:
        key = (load.layer, load.expert)
        memory = self._arena.slot(load.slot)
        last = None if hedged is None else hedged.copy
        read = self._reader.submit(key, load.slot, load.generation, memory, lane, last=last)
        under_way = UnderWay(load, read, is_hedge=hedged is not None)
        self._under_way[load.slot, load.generation] = under_way

    def take_results(self) -> None:
        """Tell the cache of the reads that have ended."""
        for result in self._reader.drain():
            under_way = self._under_way.pop((result.slot, result.generation))
            load = under_way.load
            if under_way.is_lost:
                self.faults.returned(load)
            self._count(result, under_way.read, load)
            self.faults.note(result)
            if result.code:
                self.cache.fail(load, result.code, result.text)
            elif self.cache.finish(load, result.checksum):
                self.suspects.was_read(load)
                self._cancel_others(load)
        self.suspects.take_findings()

    def _cancel_others(self, load: Load) -> None:
        """Leave out what is left to read of a key that another read has brought."""
        if (load.layer, load.expert) not in self._hedged:
            return
        for other in self._under_way.values():
            same = (other.load.layer, other.load.expert) == (load.layer, load.expert)
            if same and not self.cache.may_publish(other.load):
                self._reader.cancel(other.read)

    def look_for_slow_reads(self) -> None:
        """Hedge reads that the drive is slow with, give up those that do not return.

        Call it a few times a second, and `settle` after it.
        """
        now = time.monotonic_ns()
        lines: list[str] = []
        for one in list(self._under_way.values()):
            longest = one.read.longest_ns(now)
            if longest <= SLOW_READ_NS or one.is_lost:
                continue
            if not one.is_slow:
                one.is_slow = True
                self._counters.slow_reads += 1
                lines.append(f"{self._where(one)}: not back from the drive after 2 s")
            if longest > LOST_READ_NS:
                self._give_up(one, longest)
            elif not one.is_hedge and self._n_hedges() < self._max_hedges:
                twin = self.cache.hedge(one.load)
                if twin is not None:
                    self._hedged.add((twin.layer, twin.expert))
                    self._read(twin, Lane.DEMAND, hedged=one.read)
        for line in lines[:MAX_LINES]:
            log(line)
        if len(lines) > MAX_LINES:
            log(f"and {len(lines) - MAX_LINES} other experts' reads likewise")

    def _n_hedges(self) -> int:
        return sum(one.is_hedge for one in self._under_way.values())

    def _give_up(self, one: UnderWay, longest_ns: int) -> None:
        one.is_lost = True
        self._counters.lost_reads += 1
        text = f"{self._where(one)}: the read has not returned for {longest_ns / 1e9:.0f} s"
        log(text)
        self._reader.cancel(one.read)
        self.faults.given_up(one.load, text)
        self.cache.disown(one.load, "TIMEOUT", text)

    def _where(self, one: UnderWay) -> str:
        path, offset = self._reader.place(one.read.key, one.read.copy)
        layer, expert = one.read.key
        return f"layer {layer} expert {expert}: {path} from byte {offset} on"

    def take_ahead_bytes(self) -> int:
        """Return the bytes read ahead that no answer has told of."""
        n_bytes, self._ahead_bytes = self._ahead_bytes, 0
        return n_bytes

    def _count(self, result: ReadResult, read: ExpertRead, load: Load) -> None:
        counters = self._counters
        if result.code:
            counters.read_errors += result.code != "CANCELLED"
            return
        counters.reads += 1
        counters.reads_home += result.copy == HOME
        counters.reads_mirror += result.copy == MIRROR
        counters.bytes_read += result.n_bytes
        counters.read_ns += result.read_ns
        self.read_times.note(result.read_ns)
        if load.purpose is Purpose.AHEAD:
            self._ahead_bytes += result.n_bytes
        elif read.lane is Lane.DEMAND:
            window = self.window
            window.n_bytes += result.n_bytes
            window.first_ns = min(window.first_ns or read.started, read.started)
            window.last_ns = max(window.last_ns, read.started + result.read_ns)
