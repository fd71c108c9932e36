"""Demand beside prefetch: how much longer a missing expert takes while the lane is never empty.

    python bench/prefetch.py [--quick] [--dir DIR]

Writes a checkpoint with experts of the released size (1.1 GB, deleted at the end) under DIR, and
reads single experts as the daemon does. Between two an engine computes, in both kinds of phases: it
reads weights, and with that the caches are as a missing expert finds them. In every other phase
reads of the prefetch lane are queued all the time. Each ratio is the median of 7 alternating pairs
of phases; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.big_shards import write_big_checkpoint  # noqa: E402
from expert_daemon.checksums import Checksums  # noqa: E402
from expert_daemon.fragments import expert_fragments, slot_pieces  # noqa: E402
from expert_daemon.populate import is_huge, shared_memory  # noqa: E402
from expert_daemon.range_reader import BOUNCE_BYTES, RangeReader  # noqa: E402
from expert_daemon.reader import ExpertReader, ReadResult  # noqa: E402
from expert_daemon.reader_threads import Lane, ReaderThreads  # noqa: E402
from expert_daemon.source import Bytes, FileSource  # noqa: E402
from protocol.files.checkpoint import Checkpoint, open_checkpoint  # noqa: E402

N_LAYERS, N_EXPERTS = 3, 20
PAIRS = 7
N_THREADS = 8
QUEUED = 4  # reads of the prefetch lane that are under way at any time
N_SLOTS = QUEUED + 8  # demand takes the one that is free for longest, as from an arena
COMPUTE_S = 0.004  # between two demands
WEIGHT_BYTES, STEP_BYTES = 32 << 20, 1 << 20  # that the engine reads then, a step at a time
SWITCH_INTERVAL_S = 1e-4  # as in the daemon


@dataclass(frozen=True, slots=True)
class Phase:
    """Milliseconds of demands, and what the prefetch lane read meanwhile."""

    p50: float
    p99: float
    n_prefetched: int


class DemandBesidePrefetch:
    """The daemon's reader over a checkpoint's shards, without the daemon."""

    def __init__(self, checkpoint: Checkpoint, n_threads: int = N_THREADS) -> None:
        config = checkpoint.config
        self._keys = [
            (layer, expert)
            for layer in range(config.n_layers)
            for expert in range(config.n_experts)
        ]
        slot_bytes = checkpoint.slice_map.image.slot_bytes
        memory = shared_memory(N_SLOTS * slot_bytes)
        self._source = FileSource(checkpoint.shards, direct=True)
        self._threads = ReaderThreads(n_threads, BOUNCE_BYTES)
        self._woken = threading.Event()
        self._reader = ExpertReader(
            self._threads,
            RangeReader(self._source, straight=is_huge(memory)),
            expert_fragments(checkpoint),
            slot_pieces(checkpoint),
            self._woken.set,
            Checksums(config.n_layers, config.n_experts),
        )
        self._slots = memory.reshape(N_SLOTS, slot_bytes)
        self._weights = np.ones((WEIGHT_BYTES // STEP_BYTES, STEP_BYTES), np.uint8)
        self._random = np.random.default_rng(0)
        self._free: deque[int] = deque(range(N_SLOTS))
        self._prefetched: set[int] = set()  # slots that the prefetch lane fills
        self._n_prefetched = 0
        self._number = 0

    def close(self) -> None:
        """End the threads."""
        self._threads.close(5)
        self._source.close()

    def phase(self, n_demands: int, *, prefetch: bool) -> Phase:
        """Time so many demands, one after the other."""
        self._n_prefetched = 0
        times = []
        for _ in range(n_demands):
            self._compute(prefetch=prefetch)
            times.append(self._demand(prefetch=prefetch))
        while self._prefetched:
            self._take(prefetch=False)
        return Phase(
            float(np.percentile(times, 50)), float(np.percentile(times, 99)), self._n_prefetched
        )

    def _compute(self, *, prefetch: bool) -> None:
        """What the engine does before its next miss."""
        end = time.perf_counter() + COMPUTE_S
        while time.perf_counter() < end:
            for weights in self._weights:
                weights.max()
                self._take(prefetch=prefetch, wait=False)
                if time.perf_counter() > end:
                    break

    def _demand(self, *, prefetch: bool) -> float:
        began = time.perf_counter()
        slot = self._submit(Lane.DEMAND)
        while True:
            results = self._take(prefetch=prefetch)
            if any(result.slot == slot for result in results):
                return (time.perf_counter() - began) * 1e3

    def _take(self, *, prefetch: bool, wait: bool = True) -> list[ReadResult]:
        """Take what has ended; queue as much prefetch again."""
        if wait:
            self._woken.wait()
        self._woken.clear()
        results = self._reader.drain()
        for result in results:
            assert not result.code, result.text
            self._free.append(result.slot)
            self._n_prefetched += result.slot in self._prefetched
            self._prefetched.discard(result.slot)
        while prefetch and len(self._prefetched) < QUEUED:
            self._prefetched.add(self._submit(Lane.PREFETCH))
        return results

    def _submit(self, lane: Lane) -> int:
        slot = self._free.popleft()
        key = self._keys[self._random.integers(len(self._keys))]
        self._number += 1
        memory: Bytes = self._slots[slot]
        self._reader.submit(key, slot, self._number, memory, lane)
        return slot


def measure(model: Path, *, quick: bool, n_threads: int = N_THREADS) -> dict[str, Any]:
    """Return the ratios with prefetch against without, and what stands behind them."""
    n_demands = 300 if quick else 500  # of fewer, the 99th percentile is one unlucky read
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    bench = DemandBesidePrefetch(open_checkpoint(model), n_threads)
    pairs = []
    try:
        bench.phase(n_demands // 4, prefetch=True)
        for number in range(PAIRS):
            order = (False, True) if number % 2 else (True, False)
            both = {prefetch: bench.phase(n_demands, prefetch=prefetch) for prefetch in order}
            pairs.append((both[True], both[False]))
    finally:
        bench.close()
        sys.setswitchinterval(interval)
    return {
        "prefetch_demand_p50_ratio": _median([beside.p50 / alone.p50 for beside, alone in pairs]),
        "prefetch_demand_p99_ratio": _median([beside.p99 / alone.p99 for beside, alone in pairs]),
        "demand_p50_ms": _median([alone.p50 for _, alone in pairs]),
        "demand_p99_ms": _median([alone.p99 for _, alone in pairs]),
        "prefetched_per_demand": _median([beside.n_prefetched / n_demands for beside, _ in pairs]),
    }


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 3)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure demand beside prefetch.")
    parser.add_argument("--quick", action="store_true", help="fewer reads, as many pairs")
    parser.add_argument("--dir", default="/var/tmp", help="a directory on the drive to measure")
    parser.add_argument("--threads", type=int, default=N_THREADS, help="demand threads")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=args.dir) as home:
        model = write_big_checkpoint(
            Path(home) / "model",
            n_layers=N_LAYERS,
            n_experts=N_EXPERTS,
            top_k=6,
            rows_per_column=1000,
        )
        found = measure(model, quick=args.quick, n_threads=args.threads)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
