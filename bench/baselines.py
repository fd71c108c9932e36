"""What the daemon is compared with: fio, one preadv, a ZeroMQ echo.

Without fio the same reads are done by this process; `reference` says which it was.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import zmq

from expert_daemon.deep_reads import DeepReads, Reads
from expert_daemon.direct_io import aligned_buffer

ROOT = Path(__file__).resolve().parents[1]
ROW_DEPTH = 32
PAGE = 4096
RAW_THREADS = 8
RAW_BYTES = 2 << 20

# What fio's best for large reads is sought among: (pattern, engine, block, depth, jobs).
LARGE_READS = (
    ("read", "libaio", "1M", 8, 1),
    ("read", "libaio", "2M", 16, 1),
    ("read", "libaio", "4M", 8, 2),
    ("randread", "libaio", "2M", 16, 1),
    ("read", "psync", "2M", 1, 8),
    ("read", "io_uring", "2M", 16, 1),
)
LargeReads = tuple[str, str, str, int, int]

N_PLACES = 7  # that one preadv reads into, in turn; no multiple of the shards

# The least that an expert over ZeroMQ is: one preadv into one of a few places, and its checksum.
BARE_SERVER = """
import os, struct, sys, xxhash, zmq
from expert_daemon.direct_io import aligned_buffer
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind("ipc://" + sys.argv[1])
n_bytes = int(sys.argv[2])
files = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in sys.argv[4:]]
places = [aligned_buffer(n_bytes) for _ in range(int(sys.argv[3]))]
for place in places:
    place[:] = 1
while True:
    route, request = socket.recv_multipart()
    file, offset = struct.unpack("<qq", request)
    places.append(places.pop(0))
    assert os.preadv(files[file], [places[-1].data], offset) == n_bytes
    checksum = xxhash.xxh3_64(places[-1].data).intdigest()
    socket.send_multipart((route, checksum.to_bytes(8, "little")))
"""

ECHO = """
import sys, zmq
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind("ipc://" + sys.argv[1])
answer = bytes(int(sys.argv[2]))
while True:
    route, _ = socket.recv_multipart()
    socket.send_multipart((route, answer))
"""


def has_fio() -> bool:
    """Whether fio is installed."""
    return shutil.which("fio") is not None


def reference() -> str:
    """Return what the drive's own speed is measured with."""
    if not has_fio():
        return "own raw reads (fio is not installed)"
    return subprocess.run(["fio", "--version"], check=True, capture_output=True, text=True).stdout


class Drive:
    """The speed of the drive under some files, as fio sees it."""

    def __init__(self, large: Sequence[Path], small: Path) -> None:
        self._large = ":".join(str(path) for path in large)
        self._first = large[0]
        self._small = small
        self.best: LargeReads | None = None

    def find_best(self, seconds: float) -> None:
        """Try every way of large reads once; the best of them is what `large_rate` repeats."""
        if has_fio():
            rates = {way: self._fio_rate(way, seconds) for way in LARGE_READS}
            self.best = max(rates, key=lambda way: rates[way])

    def large_rate(self, seconds: float) -> float:
        """Bytes per second of large reads."""
        if self.best is None:
            return _raw_large_rate(self._first, seconds)
        return self._fio_rate(self.best, seconds)

    def page_rate(self, seconds: float) -> float:
        """Random reads of 4 KiB per second, 32 at a time."""
        if not has_fio():
            return _raw_page_rate(self._small, seconds)
        way = ("randread", "libaio", "4k", ROW_DEPTH, 1)
        return _fio(str(self._small), way, seconds)["iops"]

    def _fio_rate(self, way: LargeReads, seconds: float) -> float:
        return _fio(self._large, way, seconds)["bw_bytes"]


def _fio(files: str, way: LargeReads, seconds: float) -> dict[str, float]:
    pattern, engine, block, depth, jobs = way
    command = ["fio", "--name=x", f"--filename={files}", f"--rw={pattern}", f"--bs={block}"]
    command += [f"--ioengine={engine}", f"--iodepth={depth}", f"--numjobs={jobs}", "--direct=1"]
    command += [
        f"--runtime={round(seconds * 1000)}ms",
        "--time_based",
        "--group_reporting",
        "--readonly",
    ]
    if jobs > 1:
        size = min(Path(file).stat().st_size for file in files.split(":"))
        command += [f"--offset_increment={size // jobs // (1 << 20) * (1 << 20)}"]
    command += ["--output-format=json", "--norandommap"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"iops": 0.0, "bw_bytes": 0.0}  # an engine that this machine does not have
    found: dict[str, float] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]
    return found


def _raw_large_rate(path: Path, seconds: float) -> float:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    n_blocks = os.fstat(descriptor).st_size // RAW_BYTES
    end = time.perf_counter() + seconds
    read = [0] * RAW_THREADS

    def run(number: int) -> None:
        memory = aligned_buffer(RAW_BYTES)
        block = number
        while time.perf_counter() < end:
            read[number] += os.preadv(descriptor, [memory.data], block % n_blocks * RAW_BYTES)
            block += RAW_THREADS

    began = time.perf_counter()
    threads = [threading.Thread(target=run, args=(number,)) for number in range(RAW_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(descriptor)
    return sum(read) / (time.perf_counter() - began)


def _raw_page_rate(path: Path, seconds: float) -> float:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    n_pages = os.fstat(descriptor).st_size // PAGE
    deep, random = DeepReads(), np.random.default_rng()
    memory = aligned_buffer(ROW_DEPTH * PAGE)
    addresses = memory.ctypes.data + np.arange(ROW_DEPTH) * PAGE
    same = np.full(ROW_DEPTH, 1)
    n_read, began = 0, time.perf_counter()
    while time.perf_counter() < began + seconds:
        offsets = random.integers(0, n_pages, ROW_DEPTH) * PAGE
        deep.read(Reads(descriptor * same, offsets, PAGE * same, addresses))
        n_read += ROW_DEPTH
    deep.close()
    os.close(descriptor)
    return n_read / (time.perf_counter() - began)


class OnePreadv:
    """One thread that reads a stretch of a file with a single O_DIRECT preadv, of each in turn.

    Of the same files as what it is compared with, and into as many places as the bare server has: a
    stretch of memory may take half as long or twice as long as another.
    """

    def __init__(self, paths: Sequence[Path], n_bytes: int) -> None:
        self._files = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in paths]
        self._n_bytes = -(-n_bytes // PAGE) * PAGE
        self._places = [aligned_buffer(self._n_bytes) for _ in range(N_PLACES)]  # of small pages
        for place in self._places:
            place[:] = 1
        self._random = np.random.default_rng(0)
        self._n_read = 0

    def read_ms(self) -> float:
        """Milliseconds of one, at a random place of the next file."""
        file, offset = self._next_place()
        began = time.perf_counter()
        self._read(file, offset)
        return (time.perf_counter() - began) * 1e3

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            os.close(file)

    def _next_place(self) -> tuple[int, int]:
        file = self._n_read % len(self._files)
        self._n_read += 1
        n_places = (os.fstat(self._files[file]).st_size - self._n_bytes) // PAGE
        return file, int(self._random.integers(0, n_places)) * PAGE

    def _read(self, file: int, offset: int) -> None:
        place = self._places[self._n_read % N_PLACES]
        done = 0
        while done < self._n_bytes:
            done += os.preadv(self._files[file], [place[done:].data], offset + done)


class BareServer(OnePreadv):
    """The same by a process of its own that is asked over ZeroMQ and hashes what it has read."""

    def __init__(self, paths: Sequence[Path], n_bytes: int) -> None:
        super().__init__(paths, n_bytes)
        arguments = [str(self._n_bytes), str(N_PLACES), *map(str, paths)]
        self._server = ServerProcess(BARE_SERVER, arguments)

    def close(self) -> None:
        """End the process too."""
        super().close()
        self._server.close()

    def _read(self, file: int, offset: int) -> None:
        self._server.dealer.send(struct.pack("<qq", file, offset))
        self._server.dealer.recv()


class ServerProcess:
    """A small program behind a ROUTER, and a DEALER that asks it; it is given the socket's path."""

    def __init__(self, program: str, arguments: Sequence[str]) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="hr-")
        path = Path(self._directory.name) / "socket"
        command = [sys.executable, "-c", program, str(path), *arguments]
        self._process = subprocess.Popen(command, cwd=ROOT)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.dealer = self._context.socket(zmq.DEALER)
        self.dealer.connect(f"ipc://{path}")

    def close(self) -> None:
        """End it."""
        self.dealer.close(0)
        self._context.term()
        self._process.kill()
        self._process.wait()
        self._directory.cleanup()


class Echo:
    """A plain ROUTER in a process of its own that answers each message; a plain DEALER here."""

    def __init__(self, request: bytes, answer_bytes: int) -> None:
        self._request = request
        self._server = ServerProcess(ECHO, [str(answer_bytes)])

    def ask(self) -> None:
        """One round trip."""
        self._server.dealer.send(self._request)
        self._server.dealer.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.close()
