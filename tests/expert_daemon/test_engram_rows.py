from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from expert_daemon import row_table
from expert_daemon.outcome import RequestRefused
from expert_daemon.range_reader import RangeReader
from expert_daemon.reader_threads import ReaderThreads
from expert_daemon.row_table import MAX_BATCH_BYTES, RowTable
from expert_daemon.rows import EngramRows, cached_rows, most_rows
from expert_daemon.source import FileSource
from protocol.files.safetensors_index import Shard
from protocol.files.slice_map import ByteRange, EngramTable
from protocol.wire.limits import MOST_ROW_REQUESTS
from tests.support.faulty_source import Faults, FaultySource, overlaps

pytestmark = pytest.mark.timeout(60)

N_ROWS, VALUE, SCALE = 5000, 96, 3
VALUES_AT, SCALES_AT = 777, 500_001


class Harness:
    """One table in one file, rows served into a ring of 400."""

    def __init__(self, directory, ring_rows=400, faults=None, *, n_cached=0, direct=True):
        rng = np.random.default_rng(1)
        bytes_ = rng.integers(0, 256, 600_000, dtype=np.uint8)
        path = directory / "table.bin"
        path.write_bytes(bytes_.tobytes())
        shard = Shard(path, len(bytes_))
        values = bytes_[VALUES_AT : VALUES_AT + N_ROWS * VALUE].reshape(N_ROWS, VALUE)
        scales = bytes_[SCALES_AT : SCALES_AT + N_ROWS * SCALE].reshape(N_ROWS, SCALE)
        self.wanted = np.concatenate([values, scales], axis=1)
        table = EngramTable(
            index=0,
            layer=1,
            n_rows=N_ROWS,
            values=ByteRange(shard, VALUES_AT, N_ROWS * VALUE),
            scales=ByteRange(shard, SCALES_AT, N_ROWS * SCALE),
            value_bytes=VALUE,
            scale_bytes=SCALE,
        )
        files = FileSource([shard], direct=direct)
        self.source = FaultySource(files, faults) if faults else files
        self.threads = ReaderThreads(2, MAX_BATCH_BYTES)
        self.ring = np.full((ring_rows + n_cached, VALUE + SCALE), 0xEE, np.uint8)
        self.wakes = threading.Semaphore(0)
        tables = [RowTable(table, [shard], RangeReader(self.source))]
        self.rows = EngramRows(
            tables, self.ring, self.threads, self.wakes.release, n_cached=n_cached
        )

    def ready(self, timeout=10.0):
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            self.wakes.acquire(timeout=0.05)
            jobs = self.rows.drain()
            if jobs:
                return jobs
        return []

    def ask(self, numbers, request=1, session=1, *, is_engines=True):
        wanted = [(0, np.asarray(numbers, np.uint32))]
        self.rows.request(session, request, wanted, is_engines=is_engines)

    def read(self, numbers, request=1):
        self.ask(numbers, request)
        (job,) = self.ready()
        found = self.ring[job.position : job.position + len(numbers)].copy()
        self.rows.done(1, request)
        return found, job.faults

    def close(self):
        assert self.threads.close(5)
        self.source.close()


@pytest.fixture(params=["kept", "read"])
def harness(tmp_path, request, monkeypatch):
    if request.param == "read":
        monkeypatch.setattr(row_table, "MAX_SCALES_KEPT_BYTES", 0)
    made = []

    def make(**options):
        made.append(Harness(tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("n_rows", [1, 24, 64, 65, 399])
def test_rows_stand_in_the_ring_in_the_order_asked_for_duplicates_and_all(harness, n_rows):
    h = harness()
    rng = np.random.default_rng(n_rows)
    numbers = rng.integers(0, N_ROWS, n_rows)
    numbers[-1] = numbers[0]
    for request in (1, 2):
        found, faults = h.read(numbers, request)
        assert faults == []
        assert (found == h.wanted[numbers]).all()
    found, _ = h.read([0, N_ROWS - 1], 3)
    assert (found == h.wanted[[0, N_ROWS - 1]]).all()


def test_rows_in_the_page_cache_are_read_without_a_thread(harness):
    h = harness(direct=False)
    numbers = np.arange(0, N_ROWS, 99)[:40]
    h.read(numbers, 1)
    h.ask(numbers, 2)
    (job,) = h.rows.drain()
    assert (h.ring[job.position : job.position + 40] == h.wanted[numbers]).all()


def test_requests_wait_for_room_in_order(harness):
    h = harness()
    h.ask(range(300), 1)
    h.ask(range(200), 2)
    h.ask(range(10), 3)
    assert [job.request for job in h.ready()] == [1]
    time.sleep(0.05)
    assert h.rows.drain() == []
    h.rows.done(1, 1)
    jobs = h.ready()
    while len(jobs) < 2:
        jobs += h.ready()
    assert sorted(job.request for job in jobs) == [2, 3]


def test_readers_that_never_say_done_leave_the_engine_room_for_its_largest_request(harness):
    h = harness()
    most = h.rows.max_rows
    for reader in range(2, 9):
        h.ask(range(most), 1, session=reader, is_engines=False)
    held: list[Any] = []
    while len(held) < 3:
        held += h.ready()
    assert h.rows.drain() == []
    kept = [h.ring[job.position : job.position + most].copy() for job in held]
    for request in range(1, 5):
        found, _ = h.read(range(request, request + most), request)
        assert (found == h.wanted[request : request + most]).all()
    for job, before in zip(held, kept, strict=True):  # and nobody wrote where they may read
        assert (h.ring[job.position : job.position + most] == before).all()
    h.rows.client_gone(held[0].session)
    assert len(h.ready()) == 1


def test_a_request_of_the_engine_is_served_before_those_of_readers_that_came_sooner(harness):
    h = harness()
    most = h.rows.max_rows
    h.ask(range(4 * most), 1)
    for reader in (2, 3):
        h.ask(range(most), 1, session=reader, is_engines=False)
    h.ask(range(4 * most), 2)
    order: list[Any] = []
    while len(order) < 4:
        for job in h.ready():
            order.append((job.session, job.request))
            h.rows.done(job.session, job.request)
    assert order[:2] == [(1, 1), (1, 2)]
    assert sorted(order[2:]) == [(2, 1), (3, 1)]


def test_a_reader_that_keeps_all_it_may_leaves_another_room_for_the_largest_request(harness):
    for ring_rows in (400, 4 * 97 + 3):
        h = harness(ring_rows=ring_rows - cached_rows(ring_rows), n_cached=cached_rows(ring_rows))
        most = h.rows.max_rows
        assert most == most_rows(ring_rows)
        for request, n_rows in enumerate((most // 2, most // 2, most, 3), 1):
            h.ask(range(n_rows), request, session=2, is_engines=False)
        for request in range(1, 4):
            h.ask(range(request, request + most), request, session=3, is_engines=False)
            jobs: list[Any] = []
            while not any(job.session == 3 for job in jobs):
                more = h.ready()
                assert more
                jobs += more
            h.rows.done(3, request)


def test_who_holds_less_goes_before_who_asked_earlier(harness):
    h = harness()
    most = h.rows.max_rows
    for reader in (2, 3, 4):  # each has an area
        h.ask(range(most), 1, session=reader, is_engines=False)
    h.ask(range(10), 2, session=2, is_engines=False)
    h.ask(range(most), 1, session=5, is_engines=False)
    h.ask(range(20), 1, session=6, is_engines=False)
    held: list[Any] = []
    while len(held) < 3:
        held += h.ready()
    h.rows.done(3, 1)
    jobs = h.ready()
    assert [(job.session, job.request) for job in jobs] == [(5, 1)]
    h.rows.done(5, 1)
    assert [(job.session, job.request) for job in h.ready()] == [(6, 1)]


def test_a_session_may_have_few_requests_that_are_not_done(harness):
    h = harness()
    most = h.rows.max_rows
    for request in range(1, MOST_ROW_REQUESTS + 1):  # answered ones count, waiting ones too
        h.ask(range(most), request, is_engines=False)
    with pytest.raises(RequestRefused, match=f"{MOST_ROW_REQUESTS} are not done") as refused:
        h.ask([1], 99, is_engines=False)
    assert refused.value.reason == "limit"
    h.ask(range(most), 1, is_engines=False)  # again
    h.ask([1], 99, session=2, is_engines=False)
    h.rows.done(1, MOST_ROW_REQUESTS)
    h.ask([1], 100, is_engines=False)
    h.rows.client_gone(1)
    h.ask([1], 101, is_engines=False)


def test_the_same_request_again_is_announced_again_and_reads_nothing(harness):
    h = harness()
    h.ask([5], 1)
    first = h.ready()[0]
    n_rows = h.rows.counts.rows
    h.ask([5], 1)
    assert h.ready() == [first]
    assert h.rows.counts.rows == n_rows


def test_a_region_is_free_again_only_after_its_reads_have_returned(harness):
    faults = Faults(stuck=lambda *_: not faults.unstick.is_set())
    faults.unstick.set()
    h = harness(faults=faults)
    faults.unstick.clear()
    h.ask(range(400), 1)
    h.rows.client_gone(1)
    h.ask([1], 2, session=2)
    assert h.rows.drain() == []
    faults.unstick.set()
    assert [(job.session, job.request) for job in h.ready()] == [(2, 2)]


def test_one_bad_row_fails_alone(harness):
    faults = Faults(eio=overlaps(0, VALUES_AT + 10 * VALUE, VALUE))
    h = harness(faults=faults)
    found, errors = h.read(range(100))
    assert [(row, code) for row, code, _ in errors] == [(10, "EIO")]
    assert "table.bin" in errors[0][2]
    assert "row 10" in errors[0][2]
    good = [row for row in range(100) if row != 10]
    assert (found[good] == h.wanted[good]).all()
    assert not found[10].any()


def test_short_reads_of_rows_are_read_on(harness):
    h = harness(faults=Faults(short=50))
    found, errors = h.read(range(50, 90))
    assert errors == []
    assert (found == h.wanted[50:90]).all()


def test_rows_that_were_read_come_from_the_cache(harness):
    faults = Faults()
    h = harness(faults=faults, n_cached=2000)
    numbers = np.random.default_rng(3).integers(0, N_ROWS, 300)
    h.read(numbers, 1)
    n_reads = h.source.n_reads
    for request, some in ((2, numbers[:60]), (3, numbers), (4, numbers[[5, 5, 9]])):
        found, _ = h.read(some, request)
        assert (found == h.wanted[some]).all()
    assert h.source.n_reads == n_reads
    assert h.rows.counts.hits >= 60 + len(np.unique(numbers))
    mixed = np.concatenate([numbers[:20], np.arange(20)])
    found, _ = h.read(mixed, 5)
    assert (found == h.wanted[mixed]).all()


def test_a_small_cache_gives_right_rows_whatever_it_drove_out(harness):
    h = harness(n_cached=100)
    rng = np.random.default_rng(4)
    for request in range(1, 60):
        numbers = rng.zipf(1.2, int(rng.integers(1, 400))) % N_ROWS
        found, faults = h.read(numbers, request)
        assert faults == []
        assert (found == h.wanted[numbers]).all()
    assert 0 < h.rows.n_cached <= 100


def test_a_row_that_could_not_be_read_is_not_cached(harness):
    faults = Faults(eio=overlaps(0, VALUES_AT + 10 * VALUE, VALUE), eio_times=20)
    h = harness(faults=faults, n_cached=1000)
    _, errors = h.read([10, 3000], 1)
    assert [row for row, _, _ in errors] == [10]
    faults.eio = None
    found, errors = h.read([10, 3000], 2)
    assert errors == []
    assert (found == h.wanted[[10, 3000]]).all()


def test_a_page_is_read_once_whoever_shares_it(harness):
    h = harness(faults=Faults(), n_cached=0)
    if h.source.alignment(0) == 1:
        pytest.skip("this file system knows no direct reads")
    h.read(np.repeat(np.arange(0, N_ROWS, 50), 3)[:300], 1)
    span = VALUES_AT + N_ROWS * VALUE
    assert h.rows.counts.pages <= span // 4096 + 1 + (N_ROWS * SCALE) // 4096 + 2


def test_requests_at_the_same_time_do_not_mix(harness):
    h = harness(n_cached=500, ring_rows=4000)
    rng = np.random.default_rng(5)
    asked = {request: rng.integers(0, N_ROWS, 150) for request in range(1, 20)}
    for request, numbers in asked.items():
        h.ask(numbers, 1, session=request)
    jobs: list[Any] = []
    while len(jobs) < len(asked):
        jobs += h.ready()
    for job in jobs:
        found = h.ring[job.position : job.position + job.n_rows]
        assert (found == h.wanted[asked[job.session]]).all()
