"""The slot cache with its reads: what it asks for is read, what was read is told to it.

Runs on the loop's thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from .arena import Arena
from .cache import SlotCache
from .log import log
from .metrics import Counters
from .outcome import FetchAnswer, Load, WindowAnswer
from .reader import ExpertRead, ExpertReader, ReadResult
from .reader_threads import Lane

SLOW_READ_NS = 2_000_000_000


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


class ExpertLoading:
    """Starts the loads that fall due in `cache` and finishes them there."""

    def __init__(
        self, cache: SlotCache, reader: ExpertReader, arena: Arena, counters: Counters
    ) -> None:
        self.cache = cache
        self._reader = reader
        self._arena = arena
        self._counters = counters
        self._under_way: dict[tuple[int, int], tuple[Load, ExpertRead]] = {}
        self.window = WindowReads()

    def settle(self) -> tuple[list[WindowAnswer], list[FetchAnswer]]:
        """Start what fell due; return the answers that did."""
        due = self.cache.drain()
        for load in due.loads:
            lane = Lane.DEMAND if load.demand else Lane.FETCH
            read = self._reader.submit(
                (load.layer, load.expert),
                load.slot,
                load.generation,
                self._arena.slot(load.slot),
                lane,
            )
            self._under_way[load.slot, load.generation] = (load, read)
        for load in due.promoted:
            under_way = self._under_way.get((load.slot, load.generation))
            if under_way is not None:
                self._reader.raise_lane(under_way[1], Lane.DEMAND)
        return due.answers, due.fetches

    def take_results(self) -> None:
        """Tell the cache of the reads that have ended."""
        for result in self._reader.drain():
            load, read = self._under_way.pop((result.slot, result.generation))
            self._count(result, read)
            if result.code:
                self.cache.fail(load, result.code, result.text)
            else:
                self.cache.finish(load, result.checksum)

    def _count(self, result: ReadResult, read: ExpertRead) -> None:
        counters = self._counters
        if result.read_ns > SLOW_READ_NS:
            layer, expert = result.key
            log(f"layer {layer} expert {expert}: read in {result.read_ns / 1e9:.1f} s")
        if result.code:
            counters.read_errors += 1
            return
        counters.reads += 1
        counters.bytes_read += result.n_bytes
        counters.read_ns += result.read_ns
        if read.lane is Lane.DEMAND:
            window = self.window
            window.n_bytes += result.n_bytes
            window.first_ns = min(window.first_ns or read.started, read.started)
            window.last_ns = max(window.last_ns, read.started + result.read_ns)
