"""Speed of the expert daemon against what the machine gives: each figure a ratio within one run.

    python bench/daemon.py [--quick] [--dir DIR] [--no-ram] [--requests N] [--only NAME ...]

Writes a checkpoint with experts and Engram rows of the released sizes (3.5 GB, deleted at the end)
under DIR, starts a daemon over it, and compares in alternating pairs:

demand_read_vs_fio   bytes per second of missing experts against fio's best way of large reads
roundtrip_vs_echo    p50 of a MissRequest that hits against a plain DEALER and ROUTER
one_miss_vs_preadv   milliseconds of one missing expert against one thread's single preadv, from
                     an aligned place into memory that has its pages
bare_server_*        the same of a few lines that answer over ZeroMQ with one preadv and a checksum:
                     what a miss cannot be much quicker than
one_miss_pack_*      the same of an expert pack, a smaller one made for it
rows_vs_fio          48,000 cold Engram rows, in 4 KiB pages a second, against fio at depth 32
warm_vs_fio          bytes per second of filling a cold arena by Warm, against fio as above
prefetch_demand_*    demand beside prefetch against demand alone: see bench/prefetch.py

The drive under DIR gives the figures of the last line's JSON object; the same on a loop device over
RAM stand under "ram", where root allows one. At the end of the drive's own turn a million requests
more (with --quick none) say by how much the daemon's memory grows. --only measures what is named:
demand, one_miss, round_trip, rows, idle, warm, prefetch, one_miss_pack.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import headrace  # noqa: E402
from bench import prefetch  # noqa: E402
from bench.baselines import BareServer, Drive, Echo, OnePreadv, reference  # noqa: E402
from bench.big_shards import write_big_checkpoint  # noqa: E402
from protocol.files.checkpoint import Checkpoint, open_checkpoint  # noqa: E402
from protocol.wire.client import ExpertClient  # noqa: E402
from protocol.wire.codec import encode  # noqa: E402
from protocol.wire.messages import MissRequest, SlotChanges  # noqa: E402
from tests.support.running_daemon import (  # noqa: E402
    DaemonProcess,
    daemon_process,
    smallest_arena,
)

N_LAYERS, N_EXPERTS, TOP_K = 4, 28, 6
ROWS_PER_COLUMN = 400_000
N_ROWS = 24_000  # of each table
TOKEN_ROWS = 24
PAIRS = 7
REST_S = 0.7
BLOCK = 50  # round trips of one side before the other has its turn
RAM_IMAGE_BYTES = 4 << 30
RING_BYTES = 80 << 20  # beyond the smallest arena, for ring and row cache
ARENA_MAX = "64GiB"
N_REQUESTS = 1_000_000
FIGURES = ("demand", "one_miss", "round_trip", "rows", "idle")
WARM_LAYERS = 2  # that are loaded into a cold arena
PACKED_EXPERTS = 18  # of a layer, in the pack: it and its source fit into the RAM image
PACKED_ROWS = 1000  # of a column


def main() -> int:
    """Measure, print a line for each figure and the object last."""
    args = parse_arguments()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=args.dir) as home:
        found = measure_drive(Path(home), args)
    found["reference"] = reference().strip()
    if args.no_ram:
        found["ram"], found["ram_skipped"] = None, "--no-ram"
    else:
        found["ram"], found["ram_skipped"] = measure_ram(args)
    found["seconds"] = round(time.monotonic() - began)
    show(found)
    print(json.dumps(found))
    return 0


def parse_arguments() -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(description="Measure the expert daemon.")
    parser.add_argument("--dir", default="/var/tmp", help="a directory on the drive to measure")
    parser.add_argument("--quick", action="store_true", help="shorter runs, as many pairs")
    parser.add_argument("--no-ram", action="store_true", help="leave the loop device out")
    parser.add_argument("--requests", type=int, help="for growth of memory; 0: leave it out")
    parser.add_argument(
        "--only", nargs="+", choices=[*FIGURES, "warm", "prefetch", "one_miss_pack"]
    )
    args = parser.parse_args()
    if args.requests is None:
        args.requests = 0 if args.quick or args.only else N_REQUESTS
    args.seconds = 0.6 if args.quick else 2.0
    args.trips = 600 if args.quick else 3000
    args.misses = 4 * N_LAYERS if args.quick else 12 * N_LAYERS  # as many of each shard
    args.idle_s = 4.0 if args.quick else 20.0
    args.warm_pairs = 3 if args.quick else PAIRS
    return args


def show(found: dict[str, Any], before: str = "") -> None:
    """Print one figure a line."""
    for name, value in found.items():
        if isinstance(value, dict):
            show(value, f"{before}{name}.")
        else:
            print(f"{before + name:36} {value}", flush=True)


def measure_ram(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str]:
    """Return the figures of a loop device over RAM, or why there are none."""
    with contextlib.ExitStack() as stack:
        try:
            directory = stack.enter_context(ram_drive())
        except (OSError, subprocess.CalledProcessError) as error:
            return None, f"no loop device: {error}"
        args.requests = 0  # they were sent to the first drive's daemon
        return measure_drive(directory, args), ""


@contextlib.contextmanager
def ram_drive() -> Iterator[Path]:
    """An ext4 file system on a loop device over a file in RAM, mounted."""
    if os.geteuid():
        raise PermissionError("it takes root")
    with tempfile.TemporaryDirectory(prefix="headrace-ram-", dir="/dev/shm") as home:
        image, mount = Path(home, "image"), Path(home, "mnt")
        mount.mkdir()
        with image.open("wb") as file:
            file.truncate(RAM_IMAGE_BYTES)
        _run("mkfs.ext4", "-q", "-E", "lazy_itable_init=0", "-O", "^has_journal", str(image))
        loop = _run("losetup", "-f", "--show", str(image)).strip()
        try:
            _run("mount", loop, str(mount))
            yield mount
        finally:
            subprocess.run(["umount", "-l", str(mount)], check=False, capture_output=True)
            subprocess.run(["losetup", "-d", loop], check=False, capture_output=True)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def measure_drive(directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return every figure of the drive under a directory."""
    model = write_big_checkpoint(
        directory / "model",
        n_layers=N_LAYERS,
        n_experts=N_EXPERTS,
        top_k=TOP_K,
        rows_per_column=ROWS_PER_COLUMN,
    )
    with daemon_bench(model, args) as bench:
        found = bench.figures()
    if wants(args, "warm"):
        found |= measure_warm(model, args)
    if wants(args, "prefetch"):
        found |= measure_prefetch(model, args)
    shutil.rmtree(model)
    if wants(args, "one_miss_pack"):
        found |= measure_pack(directory, args)
    return found


@contextlib.contextmanager
def daemon_bench(model: Path, args: argparse.Namespace) -> Iterator[DaemonBench]:
    """A daemon over a model in its smallest arena, and an engine."""
    checkpoint = open_checkpoint(model)
    arena = smallest_arena(checkpoint, TOP_K) + RING_BYTES
    flags = ("--arena", str(arena), "--arena-max", ARENA_MAX, "--policy", "lru")
    with (
        tempfile.TemporaryDirectory(prefix="hr-", dir="/tmp") as runtime,
        daemon_process(model, Path(runtime), *flags, "--read-mode", "direct") as daemon,
        ExpertClient(runtime, "engine", checkpoint.fingerprint, TOP_K) as engine,
    ):
        yield DaemonBench(checkpoint, daemon, engine, args)


def wants(args: argparse.Namespace, name: str) -> bool:
    """Whether a figure is to be measured."""
    return not args.only or name in args.only


def measure_warm(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return how fast a cold arena fills by Warm; a fresh daemon each time."""
    checkpoint = open_checkpoint(model)
    drive = drive_of(checkpoint)
    drive.find_best(args.seconds / 2)
    ours, theirs = pairs(
        lambda: warm_rate(checkpoint),
        lambda: drive.large_rate(args.seconds),
        args.warm_pairs,
    )
    return {
        "warm_vs_fio": ratio(ours, theirs),
        "warm_gb_per_s": rounded([rate / 1e9 for rate in ours]),
        "warm_fio_gb_per_s": rounded([rate / 1e9 for rate in theirs]),
    }


def warm_rate(checkpoint: Checkpoint) -> float:
    """Bytes per second, from the message to the last expert in the table."""
    keys = [(layer, expert) for layer in range(WARM_LAYERS) for expert in range(N_EXPERTS)]
    image = checkpoint.slice_map.image
    arena = smallest_arena(checkpoint, TOP_K) + 2 * len(keys) * image.slot_bytes
    flags = ("--arena", str(arena), "--read-mode", "direct", "--no-save")
    with (
        tempfile.TemporaryDirectory(prefix="hr-", dir="/tmp") as runtime,
        daemon_process(checkpoint.path, Path(runtime), *flags),
        ExpertClient(runtime) as client,
    ):
        time.sleep(REST_S)
        began = time.perf_counter()
        client.warm(keys)
        while len(client.keys()) < len(keys):
            time.sleep(0.002)
        return len(keys) * image.expert_bytes / (time.perf_counter() - began)


def measure_pack(directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one miss from a pack, whose records are aligned."""
    source, pack = directory / "source", directory / "pack"
    write_big_checkpoint(
        source,
        n_layers=N_LAYERS,
        n_experts=PACKED_EXPERTS,
        top_k=TOP_K,
        rows_per_column=PACKED_ROWS,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        assert headrace.main(["pack", str(source), str(pack), "--copy", "--json"]) == 0
    shutil.rmtree(source)
    with daemon_bench(pack, args) as bench:
        found = bench.one_miss()
    shutil.rmtree(pack)
    return {
        "one_miss_pack_vs_preadv": found["one_miss_vs_preadv"],
        "one_miss_pack_ms": found["one_miss_ms"],
        "pack_preadv_ms": found["preadv_ms"],
    }


def drive_of(checkpoint: Checkpoint) -> Drive:
    """Return the drive under the shards of a model's experts and of its first Engram table."""
    rows = checkpoint.engram_tables[0].values.shard
    return Drive(shards_of(checkpoint), rows.path)


def shards_of(checkpoint: Checkpoint) -> list[Path]:
    """Return the files of the experts, a layer's each."""
    return [checkpoint.slice_map.slices(layer, 0)[0].shard.path for layer in range(N_LAYERS)]


def measure_prefetch(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of demand beside prefetch."""
    found = prefetch.measure(model, quick=args.quick)
    return {name: value for name, value in found.items() if name.startswith("prefetch_demand")}


class DaemonBench:
    """One daemon, and an engine that only asks."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        daemon: DaemonProcess,
        engine: ExpertClient,
        args: argparse.Namespace,
    ) -> None:
        self._daemon = daemon
        self._engine = engine
        self._args = args
        self._step = 0
        self._expert_bytes = checkpoint.slice_map.image.expert_bytes
        self._n_experts = checkpoint.config.n_experts
        self._next_key = 0
        self._random = np.random.default_rng(0)
        self._n_rows = [table.n_rows for table in checkpoint.engram_tables]
        self._shards = shards_of(checkpoint)
        self._drive = drive_of(checkpoint)

    def figures(self) -> dict[str, Any]:
        """Return them all by name."""
        found: dict[str, Any] = {}
        for name in FIGURES:
            if wants(self._args, name):
                found |= getattr(self, name)()
        if self._args.requests:
            found |= self.growth(self._args.requests)
        return found

    def demand(self) -> dict[str, Any]:
        """Missing experts, a whole layer's at a time."""
        seconds = self._args.seconds
        self._drive.find_best(seconds / 2)
        self._demand_rate(seconds)
        ours, theirs = pairs(
            lambda: self._demand_rate(seconds), lambda: self._drive.large_rate(seconds)
        )
        return {
            "demand_read_vs_fio": ratio(ours, theirs),
            "demand_gb_per_s": rounded([rate / 1e9 for rate in ours]),
            "fio_gb_per_s": rounded([rate / 1e9 for rate in theirs]),
            "fio_best": " ".join(map(str, self._drive.best or ())),
        }

    def _demand_rate(self, seconds: float) -> float:
        """Bytes per second of misses."""
        n_bytes = 0
        began = time.perf_counter()
        while time.perf_counter() < began + seconds:
            for first in range(0, N_EXPERTS, self._engine.welcome.max_experts):
                experts = range(first, min(N_EXPERTS, first + self._engine.welcome.max_experts))
                n_bytes += self._miss(self._next_key % N_LAYERS, experts).n_bytes
            self._next_key += 1
        return n_bytes / (time.perf_counter() - began)

    def _miss(self, layer: int, experts: Any) -> SlotChanges:
        answer = self._ask(layer, experts)
        self._engine.ack(answer.to_version)
        return answer

    def _ask(self, layer: int, experts: Any) -> SlotChanges:
        self._step += 1
        answer = self._engine.miss(layer, experts, step=self._step)
        assert not answer.errors, answer.errors
        return answer

    def one_miss(self) -> dict[str, Any]:
        """One missing expert, wall time and all."""
        preadv = OnePreadv(self._shards, self._expert_bytes)
        by_turns(self._one_miss_ms, preadv.read_ms, N_LAYERS * self._n_experts)  # all once
        sides = [
            by_turns(self._one_miss_ms, preadv.read_ms, self._args.misses) for _ in range(PAIRS)
        ]
        miss_ms, preadv_ms = zip(*sides, strict=True)
        bare = BareServer(self._shards, self._expert_bytes)
        bare_ms, beside_ms = zip(
            *[by_turns(bare.read_ms, preadv.read_ms, self._args.misses) for _ in range(PAIRS)],
            strict=True,
        )
        preadv.close()
        bare.close()
        return {
            "one_miss_vs_preadv": ratio(miss_ms, preadv_ms),
            "one_miss_ms": rounded(miss_ms),
            "preadv_ms": rounded(preadv_ms),
            "bare_server_vs_preadv": ratio(bare_ms, beside_ms),
            "bare_server_ms": rounded(bare_ms),
        }

    def _one_miss_ms(self) -> float:
        """Milliseconds of the next expert that is not there."""
        while True:
            self._next_key += 1
            layer, expert = self._next_key % N_LAYERS, self._next_key // N_LAYERS
            expert %= self._n_experts
            began = time.perf_counter()
            answer = self._ask(layer, [expert])
            took = time.perf_counter() - began  # the engine goes on here, and acknowledges later
            self._engine.ack(answer.to_version)
            if answer.n_bytes:
                return took * 1e3

    def round_trip(self) -> dict[str, Any]:
        """A request whose experts are all there."""
        experts = tuple(range(TOP_K))
        slots = self._miss(0, experts).slots
        request = encode(MissRequest(1 << 20, 1 << 14, 0, experts, (), 500, 0), 1, 1)
        answer = encode(
            SlotChanges(1 << 20, 500, 500, slots, (), (), n_bytes=0, read_ms=0.0, final=True),
            1,
            1,
        )

        def hit() -> None:
            self._step += 1
            self._engine.miss(0, experts, step=self._step)

        n_blocks = self._args.trips // BLOCK
        with Echo(request, len(answer)) as echo:
            sides = [
                by_turns(lambda: p50_us(hit, BLOCK), lambda: p50_us(echo.ask, BLOCK), n_blocks)
                for _ in range(PAIRS + 1)
            ]
        ours, theirs = zip(*sides[1:], strict=True)
        return {
            "roundtrip_vs_echo": ratio(ours, theirs),
            "roundtrip_us": rounded(ours),
            "echo_us": rounded(theirs),
        }

    def rows(self) -> dict[str, Any]:
        """Rows that nobody asked for before, and a token's rows again and again."""
        ours, theirs = pairs(self._page_rate, lambda: self._drive.page_rate(self._args.seconds))
        numbers = [self._random.integers(0, n_rows, TOKEN_ROWS) for n_rows in self._n_rows]

        def token() -> None:
            engine = self._engine
            engine.take_rows(engine.request_rows(0, numbers[0], [(1, numbers[1])]))

        p50_us(token, 50)
        return {
            "rows_vs_fio": ratio(ours, theirs),
            "row_pages_per_s": [round(rate) for rate in ours],
            "fio_pages_per_s": [round(rate) for rate in theirs],
            "cached_token_rows_ms": round(p50_us(token, self._args.trips) / 1e3, 3),
        }

    def _page_rate(self) -> float:
        """Pages of 4 KiB per second, read for cold rows of both tables."""
        engine = self._engine
        numbers = [self._random.integers(0, n_rows, N_ROWS) for n_rows in self._n_rows]
        pages = engine.stats()["row_pages"]
        began = time.perf_counter()
        handles = [engine.request_rows(table, rows) for table, rows in enumerate(numbers)]
        for handle in handles:
            engine.take_rows(handle)
        seconds = time.perf_counter() - began
        return float(engine.stats()["row_pages"] - pages) / seconds

    def idle(self) -> dict[str, Any]:
        """The share of one core that the daemon takes while nobody asks."""
        time.sleep(1.0)
        before = cpu_seconds(self._daemon.pid)
        time.sleep(self._args.idle_s)
        used = cpu_seconds(self._daemon.pid) - before
        self._engine.poll()
        return {"idle_cpu_percent": round(100 * used / self._args.idle_s, 3)}

    def growth(self, n_requests: int) -> dict[str, Any]:
        """How much the daemon's own memory grows with many requests, some of which miss."""
        self._many(n_requests // 20)
        before = own_memory(self._daemon.pid)
        self._many(n_requests)
        grown = own_memory(self._daemon.pid) - before
        return {"requests": n_requests, "grown_kib": grown // 1024, "memory_kib": before // 1024}

    def _many(self, n_requests: int) -> None:
        numbers = self._random.integers(0, min(self._n_rows), 4000).reshape(-1, TOKEN_ROWS - 4)
        for number in range(n_requests):
            if number % 1000 == 0:
                self._miss(1 + number // 1000 % (N_LAYERS - 1), [number // 3000 % N_EXPERTS])
            if number % 10 == 0:
                self._engine.rows(0, numbers[number % len(numbers)])
            else:
                self._miss(0, range(TOP_K))


def pairs(
    ours: Callable[[], float], theirs: Callable[[], float], n_pairs: int = PAIRS
) -> tuple[list[float], list[float]]:
    """Return both sides' figures of several runs, who goes first alternating.

    Each begins on a drive that has rested: some allow more for a while after that, and fio's own
    start would give them rest before its turns alone.
    """
    mine: list[float] = []
    others: list[float] = []
    for number in range(n_pairs):
        order = ((ours, mine), (theirs, others))
        for measure, into in order if number % 2 else order[::-1]:
            time.sleep(REST_S)
            into.append(measure())
    return mine, others


def by_turns(
    ours: Callable[[], float], theirs: Callable[[], float], n_turns: int
) -> tuple[float, float]:
    """Return both sides' medians, one call of each after the other: what the drive or the cores
    do meanwhile is the same for both.
    """
    figures = [(ours(), theirs()) for _ in range(n_turns)]
    return (
        statistics.median(mine for mine, _ in figures),
        statistics.median(other for _, other in figures),
    )


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the pairs' ratios."""
    return round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 3)


def rounded(figures: Sequence[float]) -> list[float]:
    """Return figures fit to be read."""
    return [round(figure, 3 if figure < 10 else 1) for figure in figures]


def p50_us(call: Callable[[], None], n_calls: int) -> float:
    """Return the median time of a call in microseconds."""
    times = []
    for _ in range(n_calls):
        began = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - began)
    return statistics.median(times) / 1e3


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process's threads have used; the kernel counts in ns."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def own_memory(pid: int) -> int:
    """Return the bytes of a process that are its own: neither files nor the arena."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    sys.exit(main())
