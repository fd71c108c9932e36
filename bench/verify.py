"""Speed of `headrace verify` on a pack, as a share of a plain O_DIRECT read of the same bytes.

    python bench/verify.py [--quick] [--dir DIR] [--repeats N]

Makes a pack with experts of the released size, then reads its files plainly (O_DIRECT, several
threads, several sizes: the fastest counts) and verifies it, alternating; medians. Both run in this
process after their imports. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import headrace  # noqa: E402
from tests.support.fake_checkpoint import write_fake_checkpoint  # noqa: E402

HIDDEN, WIDTH = 5120, 2304
PLAIN = ((2, 4 << 20), (4, 4 << 20), (4, 16 << 20), (8, 1 << 20))  # threads, bytes a read


def main() -> int:
    """Measure, print a line for each figure and the object last."""
    args = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=args.dir) as home:
        directory = make_pack(Path(home), args)
        n_bytes = sum(path.stat().st_size for path in directory.iterdir())
        verify(directory, args.jobs)  # imports, and the drive woken
        plain: dict[str, list[float]] = {}
        verified: list[float] = []
        for _ in range(args.repeats):
            for n_threads, read_bytes in PLAIN:
                rate = n_bytes / plain_read(directory, n_threads, read_bytes) / 1e6
                plain.setdefault(f"{n_threads} x {read_bytes >> 20} MiB", []).append(rate)
            verified.append(n_bytes / verify(directory, args.jobs) / 1e6)
    medians = {name: round(statistics.median(rates)) for name, rates in plain.items()}
    found = {
        "pack_mb": round(n_bytes / 1e6),
        "repeats": args.repeats,
        "plain_mb_per_s": medians,
        "verify_mb_per_s": [round(rate) for rate in verified],
        "verify_vs_read": round(statistics.median(verified) / max(medians.values()), 3),
    }
    for name, value in found.items():
        print(f"{name:24} {value}")
    print(json.dumps(found))
    return 0


def parse_arguments() -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(description="Measure headrace verify against plain reads.")
    parser.add_argument("--dir", default="/var/tmp", help="a directory on the drive to measure")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--per-layer", type=int, default=24, help="experts of a layer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="half of the bytes, 3 repeats")
    args = parser.parse_args()
    if args.quick:
        args.layers, args.per_layer, args.repeats = 2, 24, 3
    return args


def make_pack(home: Path, args: argparse.Namespace) -> Path:
    """Write a pack whose experts have the released shape."""
    write_fake_checkpoint(
        home / "source",
        n_shards=args.layers + 1,
        n_layers=args.layers,
        n_experts=args.per_layer,
        hidden_size=HIDDEN,
        expert_width=WIDTH,
    )
    with contextlib.redirect_stderr(io.StringIO()):
        assert headrace.main(["pack", str(home / "source"), str(home / "pack"), "--copy"]) == 0
    subprocess.run(["sync"], check=True)
    return home / "pack"


def verify(directory: Path, jobs: int) -> float:
    """Return the seconds that `headrace verify` takes here."""
    started = time.perf_counter()
    with contextlib.redirect_stderr(io.StringIO()):
        assert headrace.main(["verify", str(directory), "--jobs", str(jobs)]) == 0
    return time.perf_counter() - started


def plain_read(directory: Path, n_threads: int, read_bytes: int) -> float:
    """Return the seconds in which threads read every file's every byte, O_DIRECT, into a buffer."""
    ranges = all_ranges(directory, read_bytes)
    lock = threading.Lock()

    def work() -> None:
        buffer = mmap.mmap(-1, read_bytes)
        while True:
            with lock:
                job = next(ranges, None)
            if job is None:
                return
            descriptor, offset = job
            os.preadv(descriptor, [buffer], offset)

    threads = [threading.Thread(target=work) for _ in range(n_threads)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started


def all_ranges(directory: Path, read_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (descriptor, offset) of all reads; a file is closed when the next but one begins."""
    opened: list[int] = []
    for path in sorted(directory.iterdir()):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        opened.append(descriptor)
        for offset in range(0, path.stat().st_size, read_bytes):
            yield descriptor, offset
    # Only now: other threads may still have reads of any of them in hand.
    for descriptor in opened[:-1]:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
