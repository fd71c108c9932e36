"""Measures how this machine's drive is read fastest, with the daemon's own reader on the model.

What counts is what a token waits for: the time until all of one layer's picks are there, and the
time until a single one is. Nothing of the daemon needs to run, and nothing is written.
"""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from protocol.files.checkpoint import Checkpoint

from .checksums import Checksums
from .fragments import expert_fragments, slot_pieces
from .populate import is_huge, shared_memory
from .range_reader import BOUNCE_BYTES, RangeReader
from .reader import ExpertReader, Key
from .reader_threads import ReaderThreads
from .source import FileSource
from .tuned import SAFE, Reading, fits_in_memory

THREADS = (1, 2, 4, 8, 16, 32)
CACHED_THREADS = (4, 8, 16)  # not fewer: what is not cached yet comes from the drive
CUTS = (1 << 19, 1 << 20, 1 << 21, 1 << 22)
PARTS = (1, 4, 10, 20)
WORTH = 0.97  # of the best time: less is no reason for more threads, or for the page cache
N_CACHED = 48  # experts that a buffered measurement goes round in
WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Try:
    """One Reading and what it gave."""

    reading: Reading
    layer_ms: float  # until all of a layer's picks were read
    expert_ms: float  # until a single expert was read
    bytes_per_s: float  # while a layer's picks were read

    @property
    def cost_ms(self) -> float:
        """What is to be small."""
        return self.layer_ms + self.expert_ms


@dataclass(frozen=True, slots=True)
class Tuned:
    """What was found and everything that was tried."""

    direct: Try  # the best that leaves the page cache alone
    buffered: Try | None  # the best through it, where that is better; for models that fit in memory
    tries: tuple[Try, ...]
    fits_in_memory: bool

    @property
    def best(self) -> Try:
        """What this model is read best by."""
        return self.buffered or self.direct


def tune(
    checkpoint: Checkpoint,
    *,
    available_bytes: int,
    seconds: float = 15.0,
    told: Callable[[Try], None] = lambda _: None,
) -> Tuned:
    """Return the best Reading for the model's file system. `told` is called after each try.

    available_bytes  memory that could be had: whether the page cache is tried, `fits_in_memory`

    Raises OSError and ShardError where the shards cannot be read.
    """
    fits = fits_in_memory(checkpoint.shards, available_bytes)
    cuts, parts = _shapes(checkpoint)
    n_tries = len(THREADS) + len(cuts) + len(parts) + (len(CACHED_THREADS) if fits else 0)
    tries: list[Try] = []

    def attempt(reading: Reading) -> Try:
        known = [one for one in tries if one.reading == reading]
        if known:
            return known[0]
        one = measure(checkpoint, reading, seconds / n_tries)
        tries.append(one)
        told(one)
        return one

    direct = _first_good([attempt(replace(SAFE, threads=n)) for n in THREADS])
    direct = _better(direct, [attempt(replace(direct.reading, cut_bytes=cut)) for cut in cuts])
    direct = _better(direct, [attempt(replace(direct.reading, max_parts=n)) for n in parts])
    buffered = None
    if fits:
        cached = replace(direct.reading, mode="buffered")
        found = _first_good([attempt(replace(cached, threads=n)) for n in CACHED_THREADS])
        buffered = found if found.cost_ms < direct.cost_ms * WORTH else None
    return Tuned(direct, buffered, tuple(tries), fits)


def _shapes(checkpoint: Checkpoint) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cuts and numbers of parts that are worth trying: a small expert is one read in any case."""
    if checkpoint.slice_map.image.slot_bytes < 2 * CUTS[0]:
        return (), ()
    return CUTS, PARTS


def _first_good(tries: Sequence[Try]) -> Try:
    """The first that is nearly as good as the best: fewer threads disturb others less."""
    least = min(one.cost_ms for one in tries)
    return next(one for one in tries if one.cost_ms * WORTH <= least)


def _better(so_far: Try, tries: Sequence[Try]) -> Try:
    """The best of all, but what was found so far where it is nearly as good."""
    least = min(tries, key=lambda one: one.cost_ms, default=so_far)
    return least if least.cost_ms < so_far.cost_ms * WORTH else so_far


def measure(checkpoint: Checkpoint, reading: Reading, seconds: float) -> Try:
    """Read a layer's picks and single experts in turn for about so long; medians of both."""
    chance = random.Random(0)
    config = checkpoint.config
    keys = [
        (layer, expert) for layer in range(config.n_layers) for expert in range(config.n_experts)
    ]
    chance.shuffle(keys)
    if reading.mode == "buffered":
        keys = keys[:N_CACHED]
    with _reader(checkpoint, reading) as read:
        draw = _drawn(keys)
        if reading.mode == "buffered":
            read(keys[: config.top_k])
            for first in range(0, len(keys), config.top_k):
                read(keys[first : first + config.top_k])
        layers: list[float] = []
        singles: list[float] = []
        n_bytes = 0
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(layers) < 3:
            picked = [next(draw) for _ in range(config.top_k)]
            took, n_bytes = read(picked)
            layers.append(took)
            singles.append(read([next(draw)])[0])
    return Try(
        reading,
        layer_ms=statistics.median(layers) * 1e3,
        expert_ms=statistics.median(singles) * 1e3,
        bytes_per_s=n_bytes / statistics.median(layers),
    )


def _drawn(keys: Sequence[Key]) -> Iterator[Key]:
    while True:
        yield from keys


Read = Callable[[Sequence[Key]], tuple[float, int]]


@contextmanager
def _reader(checkpoint: Checkpoint, reading: Reading) -> Iterator[Read]:
    """Give a function that reads keys at once: (seconds, bytes)."""
    config = checkpoint.config
    slot_bytes = checkpoint.slice_map.image.slot_bytes
    memory = shared_memory(config.top_k * slot_bytes)
    source = FileSource(checkpoint.shards, direct=reading.mode == "direct")
    threads = ReaderThreads(reading.threads, BOUNCE_BYTES)
    woken = threading.Event()
    reader = ExpertReader(
        threads,
        RangeReader(source, straight=is_huge(memory)),
        expert_fragments(checkpoint),
        slot_pieces(checkpoint),
        woken.set,
        Checksums(config.n_layers, config.n_experts),
        reading.shape,
    )
    slots = [memory[n * slot_bytes : (n + 1) * slot_bytes] for n in range(config.top_k)]

    def read(keys: Sequence[Key]) -> tuple[float, int]:
        began = time.perf_counter()
        for number, key in enumerate(keys):
            reader.submit(key, number, 0, slots[number])
        n_left, n_bytes = len(keys), 0
        while n_left:
            if not woken.wait(WAIT_S):
                raise TimeoutError(f"{reading.text}: no answer from the drive in {WAIT_S:g} s")
            woken.clear()
            for result in reader.drain():
                if result.code:
                    raise OSError(f"{result.code}: {result.text}")
                n_left -= 1
                n_bytes += result.n_bytes
        return time.perf_counter() - began, n_bytes

    try:
        yield read
    finally:
        if threads.close(1.0):
            source.close()
        if reading.mode == "buffered":
            _drop(checkpoint)


def _drop(checkpoint: Checkpoint) -> None:
    """Leave the page cache as it was meant to be: without the shards."""
    for shard in checkpoint.shards:
        descriptor = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
