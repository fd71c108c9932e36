from __future__ import annotations

import ctypes
import mmap
import os
import random
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import xxhash

from expert_daemon.checksums import Checksums
from expert_daemon.copies import HOME, MIRROR, Copies
from expert_daemon.direct_io import aligned_buffer
from expert_daemon.log import flush
from expert_daemon.range_reader import RangeReader
from expert_daemon.read_plan import MAX_PARTS, Fragment
from expert_daemon.reader import AT_ONCE, ExpertReader, ReadResult
from expert_daemon.reader_threads import Lane, ReaderThreads
from expert_daemon.slot_hash import SlotHash
from expert_daemon.source import FileSource
from protocol.errors import ShardError
from protocol.files.safetensors_index import Shard
from tests.support.faulty_source import Faults, FaultySource, overlaps

pytestmark = pytest.mark.timeout(60)

SIZES = (700_000, 4100, 2_500_000, 31, 1 << 20, 4096)
N_EXPERTS = 5
MIRROR_SHIFT = 8192 + 40


def cached_pages(descriptor, n_bytes):
    """Pages of a file's beginning that are in the page cache (looking does not read any)."""
    libc = ctypes.CDLL(None, use_errno=True)
    mapping = mmap.mmap(descriptor, n_bytes, prot=mmap.PROT_READ)
    view = np.frombuffer(mapping, np.uint8)
    found = np.zeros(-(-n_bytes // 4096), np.uint8)
    address = ctypes.c_void_p(view.ctypes.data)
    status = libc.mincore(address, ctypes.c_size_t(n_bytes), ctypes.c_void_p(found.ctypes.data))
    assert status == 0
    return int((found & 1).sum())


class Harness:
    """Experts of known bytes in one file, read by a real ExpertReader."""

    def __init__(
        self, directory: Path, *, start=1234, direct=True, n_threads=3, faults=None, mirrored=False
    ):
        rng = np.random.default_rng(7)
        self.bytes = rng.integers(0, 256, start + N_EXPERTS * sum(SIZES) + 77, dtype=np.uint8)
        path = directory / "experts.bin"
        path.write_bytes(self.bytes.tobytes())
        self.start = start
        mirror = directory / "mirror.bin"  # the same experts at other places
        mirror.write_bytes(bytes(MIRROR_SHIFT) + self.bytes.tobytes())
        shards = [Shard(path, len(self.bytes)), Shard(mirror, MIRROR_SHIFT + len(self.bytes))]
        files = FileSource(shards, direct=direct)
        self.source = FaultySource(files, faults)
        self.files = files
        self.pieces = []
        at = 0
        for size in SIZES:
            self.pieces.append((at, size))
            at += -(-size // 256) * 256
        self.slot_bytes = -(-at // 4096) * 4096
        self.wakes = threading.Semaphore(0)
        self.threads = ReaderThreads(n_threads, (4 << 20) + 8192)
        self.reader = ExpertReader(
            self.threads,
            RangeReader(self.source),
            self.fragments,
            [self.pieces] * 4,
            self.wakes.release,
            Checksums(4, N_EXPERTS),
            mirror_of=self.mirror_fragments if mirrored else lambda _: [],
        )

    def fragments(self, key):
        offset = self.start + key[1] * sum(SIZES)
        fragments = []
        for (at, size), _ in zip(self.pieces, SIZES, strict=True):
            fragments.append(Fragment(0, offset, size, at))
            offset += size
        return fragments

    def mirror_fragments(self, key):
        return [
            Fragment(1, one.offset + MIRROR_SHIFT, one.n_bytes, one.slot_offset)
            for one in self.fragments(key)
        ]

    def slot(self):
        return aligned_buffer(self.slot_bytes)

    def wanted(self, expert):
        first = self.start + expert * sum(SIZES)
        return self.bytes[first : first + sum(SIZES)].tobytes()

    def read(self, expert=0, slot=None, timeout=20.0) -> tuple[ReadResult, bytes]:
        memory = self.slot() if slot is None else slot
        self.reader.submit((3, expert), 9, 1, memory)
        return self.results(1, timeout)[0], self.of_slot(memory)

    def of_slot(self, memory):
        return b"".join(memory[at : at + size].tobytes() for at, size in self.pieces)

    def results(self, n, timeout=20.0):
        results: list[ReadResult] = []
        end = time.monotonic() + timeout
        while len(results) < n and time.monotonic() < end:
            self.wakes.acquire(timeout=0.1)
            results += self.reader.drain()
        assert len(results) == n
        return results

    def close(self):
        self.source.faults.unstick.set()
        assert self.threads.close(5)
        self.source.close()


@pytest.fixture
def harness(tmp_path):
    made = []

    def make(**options):
        made.append(Harness(tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("start", [0, 1234, 4096, 8])
def test_an_expert_read_whole_has_its_shard_bytes_and_checksum(harness, direct, start):
    h = harness(direct=direct, start=start)
    for expert in range(N_EXPERTS):
        result, found = h.read(expert)
        assert result.code == "", result.text
        assert found == h.wanted(expert)
        assert result.checksum == xxhash.xxh3_64_intdigest(found)
        assert result.n_bytes == sum(SIZES)
        assert result.generation == 1


@pytest.mark.parametrize("short", [1000, 4096, 4097, 65536])
def test_short_reads_are_read_on(harness, short):
    h = harness(faults=Faults(short=short))
    result, found = h.read(2)
    assert result.code == ""
    assert found == h.wanted(2)


def test_two_errors_are_retried_and_the_third_names_the_range(harness):
    h = harness()
    at = h.start + 100_000
    h.source.faults.eio, h.source.faults.eio_times = overlaps(0, at, 1), 2
    result, found = h.read(0)
    assert result.code == ""
    assert found == h.wanted(0)
    h.source.faults.eio_times = 3
    result, _ = h.read(0)
    assert result.code == "EIO"
    assert "layer 3 expert 0" in result.text
    assert "experts.bin" in result.text
    assert "tried 3 times" in result.text
    result, _ = h.read(1)
    assert result.code == ""


def test_a_shard_that_ends_early_names_layer_expert_file_and_offset(harness):
    h = harness()
    end = h.start + 4 * sum(SIZES) + 1000
    with h.files.path(0).open("r+b") as file:
        file.truncate(end)
    result, _ = h.read(4)
    assert result.code == "TRUNCATED"
    for word in ("layer 3 expert 4", "experts.bin", str(end)):
        assert word in result.text


def test_a_later_read_that_differs_is_read_again_and_then_fails(harness):
    h = harness()
    assert h.read(0)[0].code == ""
    h.source.faults.wrong = overlaps(0, h.start, 64)
    h.source.faults.wrong_times = 1
    result, found = h.read(0)
    assert result.code == ""
    assert found == h.wanted(0)
    assert h.reader.n_checksum_retries == 1
    h.source.faults.wrong_times = -1
    result, _ = h.read(0)
    assert result.code == "CHECKSUM"
    assert "experts.bin" in result.text


def test_a_remembered_checksum_holds_the_first_read(harness):
    h = harness()
    h.reader.checksums.learn(3, 1, 42)
    assert h.read(1)[0].code == "CHECKSUM"


def test_what_cannot_be_read_at_home_comes_from_the_mirror(harness, capfd):
    h = harness(mirrored=True)
    h.source.faults.eio = overlaps(0, h.start + 100_000, 1)
    for _ in range(2):
        result, found = h.read(0)
        assert result.code == "", result.text
        assert found == h.wanted(0)
    assert h.reader.n_fallbacks == 1  # then it is asked first
    flush()
    line = capfd.readouterr().err
    assert "layer 3 expert 0" in line
    assert "experts.bin" in line
    h.source.faults.eio = None
    assert h.read(1)[0].code == ""
    assert h.reader.n_fallbacks == 1


def test_wrong_bytes_at_home_come_right_from_the_mirror(harness):
    h = harness(mirrored=True)
    assert [h.read(0)[0].copy for _ in range(2)] == [HOME, MIRROR]
    h.source.faults.wrong = overlaps(0, h.start, 64)
    result, found = h.read(0)
    assert (result.code, found, result.copy) == ("", h.wanted(0), MIRROR)
    assert [(fault.copy, fault.code) for fault in result.faults] == [(HOME, "CHECKSUM")]
    assert result.n_bytes == 3 * sum(SIZES)
    assert (h.reader.n_checksum_retries, h.reader.n_fallbacks) == (1, 1)


def test_where_both_places_fail_the_read_has_failed(harness):
    h = harness(mirrored=True)
    h.source.faults.eio = lambda *_: True
    result, _ = h.read(0)
    assert result.code == "EIO"
    assert "experts.bin" in result.text
    assert "mirror.bin" in result.text
    h.source.faults.eio = None
    result, found = h.read(0)
    assert (result.code, found) == ("", h.wanted(0))


def test_a_home_that_ends_early_is_made_up_for_by_the_mirror(harness):
    h = harness(mirrored=True)
    with h.files.path(0).open("r+b") as file:
        file.truncate(h.start + 1000)
    for expert in range(N_EXPERTS):
        result, found = h.read(expert)
        assert (result.code, result.copy, found) == ("", MIRROR, h.wanted(expert))
    assert h.reader.n_fallbacks >= 1


def test_where_one_copy_is_wrong_and_the_other_unreadable_the_error_is_not_final(harness):
    h = harness(mirrored=True)
    h.reader.checksums.learn(3, 0, 42)
    h.source.faults.eio = lambda shard, *_: shard == 1
    result, _ = h.read(0)
    assert result.code == "EIO"
    assert [(fault.copy, fault.code) for fault in result.faults] == [
        (HOME, "CHECKSUM"),
        (MIRROR, "EIO"),
    ]


@pytest.mark.timing
def test_experts_come_from_both_copies_the_slow_one_giving_fewer(harness):
    slow = Faults(late=lambda shard, *_: 0.03 * (shard == 1))
    h = harness(mirrored=True, faults=slow, n_threads=1)
    copies = [h.read(number % N_EXPERTS)[0].copy for number in range(30)]
    assert copies[:4] == [HOME, MIRROR, HOME, MIRROR]
    assert 1 <= copies[10:].count(MIRROR) <= 8


def test_a_second_read_goes_to_the_mirror_first(harness):
    h = harness(mirrored=True, faults=Faults(stuck=lambda shard, *_: shard == 0))
    memory = h.slot()
    h.reader.submit((3, 2), 1, 1, memory, last=HOME)
    assert h.results(1)[0].code == ""
    assert h.of_slot(memory) == h.wanted(2)


def test_results_come_in_any_order_and_each_once(harness):
    h = harness(faults=Faults(shuffle=random.Random(3)))
    slots = [h.slot() for _ in range(20)]
    for number, slot in enumerate(slots):
        h.reader.submit((0, number % N_EXPERTS), number, number, slot)
    results = h.results(20)
    assert sorted(result.slot for result in results) == list(range(20))
    assert h.reader.n_in_flight == 0
    for number, slot in enumerate(slots):
        assert h.of_slot(slot) == h.wanted(number % N_EXPERTS)


def test_a_cancelled_read_gives_its_result_after_its_last_call_returned(harness):
    faults = Faults(stuck=lambda *_: True)
    h = harness(faults=faults, n_threads=1)
    read = h.reader.submit((0, 0), 0, 0, h.slot())
    time.sleep(0.05)
    h.reader.cancel(read)
    time.sleep(0.05)
    assert h.reader.drain() == []
    faults.unstick.set()
    assert h.results(1)[0].code in ("", "CANCELLED")


def test_a_cancelled_prefetch_that_has_not_begun_ends_although_demand_is_outstanding(harness):
    faults = Faults(stuck=lambda *_: True)
    h = harness(faults=faults, n_threads=1)
    h.reader.submit((0, 0), 0, 0, h.slot())
    read = h.reader.submit((0, 1), 1, 0, h.slot(), Lane.PREFETCH)
    h.reader.cancel(read)
    assert [(one.slot, one.code) for one in h.results(1)] == [(1, "CANCELLED")]
    faults.unstick.set()
    assert [(one.slot, one.code) for one in h.results(1)] == [(0, "")]


def test_a_prefetch_is_read_in_small_pieces_and_demand_in_few(harness):
    h = harness()
    h.start = 0
    h.fragments = lambda key: [Fragment(0, 0, 20 << 20, 0)]
    h.reader.copies = Copies(h.fragments)
    h.threads.close(5)
    assert len(h.reader.submit((0, 0), 0, 0, h.slot(), Lane.PREFETCH).parts) == 20
    assert len(h.reader.submit((0, 1), 1, 0, h.slot(), Lane.DEMAND).parts) <= MAX_PARTS


def test_an_expert_that_somebody_waits_for_is_read_from_its_first_bytes_on(harness):
    begun = []

    def is_stuck(_shard, offset, _n_bytes):
        begun.append(offset)
        return True

    faults = Faults(stuck=is_stuck)
    h = harness(faults=faults, n_threads=8)
    h.fragments = lambda key: [Fragment(0, key[1] << 26, 20 << 20, 0)]
    h.reader.copies = Copies(h.fragments)
    h.reader.submit((0, 0), 0, 0, h.slot())
    time.sleep(0.1)
    first = sorted(begun)
    assert first == [number * first[1] for number in range(AT_ONCE)]
    h.reader.submit((0, 1), 1, 0, h.slot())
    time.sleep(0.1)
    assert sorted(begun) == [*first, *((1 << 26) + offset for offset in first)]
    faults.stuck = None
    faults.unstick.set()
    assert [result.code for result in h.results(2)] == ["TRUNCATED"] * 2


def test_the_hash_of_a_prefetch_waits_while_demand_is_outstanding(harness, monkeypatch):
    monkeypatch.setattr("expert_daemon.slot_hash.STEP_BYTES", 1 << 17)
    faults = Faults()
    h = harness(faults=faults, n_threads=1)
    slot = h.slot()
    stepped = threading.Event()
    original = SlotHash.step

    def step(hashing):
        stepped.set()
        time.sleep(0.001)
        return original(hashing)

    monkeypatch.setattr(SlotHash, "step", step)
    h.reader.submit((0, 1), 1, 0, slot, Lane.PREFETCH)
    assert stepped.wait(5)
    faults.stuck = lambda *_: not faults.unstick.is_set()
    h.reader.submit((0, 0), 0, 0, h.slot())
    time.sleep(0.1)
    assert h.reader.drain() == []
    faults.unstick.set()
    assert [one.slot for one in h.results(2)] == [0, 1]
    assert h.of_slot(slot) == h.wanted(1)


def test_a_prefetch_that_is_raised_while_it_is_hashed_ends_at_once(harness, monkeypatch):
    monkeypatch.setattr("expert_daemon.slot_hash.STEP_BYTES", 1 << 17)
    faults = Faults()
    h = harness(faults=faults, n_threads=2)
    stepped = threading.Event()
    original = SlotHash.step

    def step(hashing):
        stepped.set()
        time.sleep(0.001)
        return original(hashing)

    monkeypatch.setattr(SlotHash, "step", step)
    read = h.reader.submit((0, 1), 1, 0, h.slot(), Lane.PREFETCH)
    assert stepped.wait(5)
    faults.stuck = lambda *_: not faults.unstick.is_set()
    h.reader.submit((0, 0), 0, 0, h.slot())
    h.reader.raise_lane(read, Lane.DEMAND)
    (result,) = h.results(1)
    assert (result.slot, result.code) == (1, "")
    faults.unstick.set()
    h.results(1)


def test_demand_goes_before_prefetch_and_a_raised_read_with_it(harness):
    faults = Faults(stuck=lambda shard, offset, n: not faults.unstick.is_set())
    h = harness(faults=faults, n_threads=1)
    h.reader.submit((0, 0), 0, 0, h.slot())
    time.sleep(0.05)
    late = h.reader.submit((0, 1), 1, 0, h.slot(), Lane.PREFETCH)
    h.reader.submit((0, 2), 2, 0, h.slot(), Lane.PREFETCH)
    h.reader.submit((0, 3), 3, 0, h.slot(), Lane.DEMAND)
    h.reader.raise_lane(late, Lane.DEMAND)
    faults.unstick.set()
    assert [result.slot for result in h.results(4)] == [0, 3, 1, 2]


def test_a_read_that_never_returns_holds_back_neither_others_nor_the_end(harness):
    faults = Faults(stuck=overlaps(0, 1234, 8))
    h = harness(faults=faults, n_threads=2)
    h.reader.submit((0, 0), 0, 0, h.slot())
    result, found = h.read(3)
    assert result.code == ""
    assert found == h.wanted(3)
    began = time.monotonic()
    assert not h.threads.close(0.1)
    assert time.monotonic() - began < 1


def test_direct_reads_leave_nothing_in_the_page_cache(harness, tmp_path):
    h = harness(start=4096)
    if h.files.alignment(0) == 1:
        pytest.skip("this file system refuses O_DIRECT")
    descriptor = os.open(h.files.path(0), os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    for expert in range(N_EXPERTS):
        assert h.read(expert)[0].code == ""
    assert cached_pages(descriptor, len(h.bytes)) == 0
    os.close(descriptor)


@pytest.mark.parametrize("direct", [True, False])
def test_pages_read_through_the_cache_stay_only_where_buffered_was_chosen(harness, direct):
    h = harness(start=0, direct=direct)
    descriptor = os.open(h.files.path(0), os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    memory = aligned_buffer(1 << 20)
    RangeReader(h.files).read_range(0, 0, memory, n_bytes=1 << 20, align=1)
    assert (cached_pages(descriptor, 1 << 20) == 0) == direct
    os.close(descriptor)


def test_a_missing_shard_is_a_shard_error(tmp_path):
    with pytest.raises(ShardError, match=r"gone\.bin"):
        FileSource([Shard(tmp_path / "gone.bin", 1)], direct=True)


def test_a_file_system_without_direct_reads_is_read_buffered_with_one_line(capfd, monkeypatch):
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("no tmpfs at /dev/shm")
    with tempfile.NamedTemporaryFile(dir=shm) as file:
        file.write(os.urandom(10_000))
        file.flush()
        source = FileSource([Shard(Path(file.name), 10_000)] * 2, direct=True)
        memory = aligned_buffer(4096)
        RangeReader(source).read_range(0, 5, memory, n_bytes=100, align=source.alignment(0))
        flush()
        lines = capfd.readouterr().err.splitlines()
        assert len(lines) <= 1  # none where tmpfs has learnt direct reads
        source.close()
