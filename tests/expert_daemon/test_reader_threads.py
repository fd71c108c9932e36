from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from expert_daemon.reader_threads import N_PREFETCH_THREADS, Lane, ReaderThreads


def wait_for(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def wait(event):
    event.wait(10)


def _note(done, number, _bounce):
    done.append(number)


def n_threads(pool):
    return len(pool._workers)


def test_threads_that_hang_are_replaced_and_the_surplus_ends():
    pool = ReaderThreads(2, 4096)
    stuck, done = threading.Event(), list[int]()
    for _ in range(2):
        pool.submit(Lane.DEMAND, lambda _: wait(stuck))
    pool.submit(Lane.DEMAND, lambda _: done.append(1))
    time.sleep(0.05)
    assert done == []
    assert pool.relieve(10_000_000) == 2
    wait_for(lambda: done)
    assert n_threads(pool) == 4
    stuck.set()
    wait_for(lambda: pool.relieve(10_000_000) == 0)
    for _ in range(200):
        pool.submit(Lane.DEMAND, lambda _: None)
    wait_for(lambda: n_threads(pool) == 2)
    assert pool.close(5)


def test_busy_threads_that_do_not_hang_get_no_help():
    pool = ReaderThreads(1, 4096)
    pool.submit(Lane.DEMAND, lambda _: time.sleep(0.05))
    assert pool.relieve(10_000_000_000) == 0
    assert n_threads(pool) == 1
    assert pool.close(5)


def test_hanging_threads_are_replaced_up_to_a_limit(monkeypatch):
    monkeypatch.setattr("expert_daemon.reader_threads.MAX_SPARE", 3)
    pool = ReaderThreads(1, 4096)
    stuck = threading.Event()
    for _ in range(9):
        pool.submit(Lane.DEMAND, lambda _: wait(stuck))
    for _ in range(6):
        time.sleep(0.02)
        pool.relieve(5_000_000)
    assert n_threads(pool) == 4
    stuck.set()
    assert pool.close(5)


class Recorder:
    """Work that notes when it runs, and may be held."""

    def __init__(self):
        self.ran = []
        self.go = threading.Event()

    def work(self, name, *, held=False):
        def run(_):
            if held:
                self.go.wait(10)
            self.ran.append(name)

        return run


def test_idle_lanes_begin_nothing_while_somebody_waits_and_go_on_afterwards():
    pool = ReaderThreads(3, 4096)
    seen = Recorder()
    pool.submit(Lane.DEMAND, seen.work("demand", held=True))
    for number in range(4):
        pool.submit(Lane.IDLE, seen.work(f"idle {number}"))
        pool.submit(Lane.PREFETCH, seen.work(f"prefetch {number}"))
    time.sleep(0.1)
    assert seen.ran == []
    assert pool.depths() == {"demand": 0, "fetch": 0, "idle": 4, "prefetch": 4}
    seen.go.set()
    wait_for(lambda: len(seen.ran) == 9)
    assert seen.ran[0] == "demand"
    assert pool.close(5)


def test_readers_work_stops_the_idle_lanes_too():
    pool = ReaderThreads(2, 4096)
    seen = Recorder()
    pool.submit(Lane.FETCH, seen.work("fetch", held=True))
    pool.submit(Lane.PREFETCH, seen.work("prefetch"))
    time.sleep(0.05)
    assert seen.ran == []
    seen.go.set()
    wait_for(lambda: len(seen.ran) == 2)
    assert pool.close(5)


def test_work_that_was_submitted_while_all_hang_is_begun_by_who_helps_out():
    pool = ReaderThreads(2, 4096)
    stuck, done = threading.Event(), list[int]()
    for _ in range(2):
        pool.submit(Lane.DEMAND, lambda _: wait(stuck))
    wait_for(lambda: pool.depth() == 0)
    for number in range(20):
        pool.submit(Lane.DEMAND, partial(_note, done, number))
    time.sleep(0.05)
    assert pool.relieve(10_000_000) == 2
    wait_for(lambda: sorted(done) == list(range(20)))
    stuck.set()
    assert pool.close(5)


@pytest.mark.parametrize("lane", [Lane.IDLE, Lane.PREFETCH])
def test_work_that_waits_wakes_no_more_threads_than_there_are(lane):
    pool = ReaderThreads(3, 4096)
    demand, done = threading.Event(), list[int]()
    pool.submit(Lane.DEMAND, lambda _: wait(demand))
    for number in range(500):
        pool.submit(lane, partial(_note, done, number))
    assert pool._tokens.qsize() <= 3
    assert pool._prefetch_tokens.qsize() <= N_PREFETCH_THREADS
    demand.set()
    wait_for(lambda: sorted(done) == list(range(500)))
    assert pool.close(5)


def test_no_more_pieces_of_prefetch_are_in_flight_than_threads_of_it():
    pool = ReaderThreads(8, 4096)
    lock, state = threading.Lock(), {"now": 0, "most": 0, "done": 0}

    def work(_):
        with lock:
            state["now"] += 1
            state["most"] = max(state["most"], state["now"])
        time.sleep(0.005)
        with lock:
            state["now"] -= 1
            state["done"] += 1

    for _ in range(20):
        pool.submit(Lane.PREFETCH, work)
    wait_for(lambda: state["done"] == 20)
    assert state["most"] == N_PREFETCH_THREADS
    assert pool.close(5)


def test_prefetch_holds_no_thread_that_demand_needs():
    pool = ReaderThreads(1, 4096)
    seen = Recorder()
    for _ in range(2):
        pool.submit(Lane.PREFETCH, lambda _: wait(seen.go))
    time.sleep(0.05)
    pool.submit(Lane.DEMAND, seen.work("demand"))
    wait_for(lambda: seen.ran == ["demand"])
    seen.go.set()
    assert pool.close(5)


def test_what_hangs_for_ever_does_not_stop_the_idle_lanes_for_ever():
    pool = ReaderThreads(2, 4096)
    stuck = threading.Event()
    done: list[int] = []
    pool.submit(Lane.DEMAND, lambda _: wait(stuck))
    pool.submit(Lane.IDLE, lambda _: done.append(1))
    pool.submit(Lane.PREFETCH, lambda _: done.append(2))
    time.sleep(0.05)
    assert done == []
    assert pool.relieve(10_000_000) == 1
    wait_for(lambda: sorted(done) == [1, 2])
    stuck.set()
    assert pool.close(5)


def test_a_flood_of_every_lane_is_worked_off():
    pool = ReaderThreads(3, 4096)
    done: list[int] = []
    for number in range(3000):
        pool.submit(Lane(number % 4), partial(_note, done, number))
    wait_for(lambda: len(done) == 3000, 20)
    assert pool.close(5)


def test_work_gets_the_buffer_that_was_used_last_and_never_one_in_use():
    pool = ReaderThreads(3, 4096)
    used, barrier = [], threading.Barrier(3)

    def run(together, bounce):
        if together:
            barrier.wait(5)
        used.append(bounce.ctypes.data)

    for number in range(1, 6):
        pool.submit(Lane.DEMAND, partial(run, False))
        wait_for(lambda number=number: len(used) == number and pool._n_urgent == 0)
    assert len(set(used)) == 1
    for _ in range(3):
        pool.submit(Lane.DEMAND, partial(run, True))
    wait_for(lambda: len(used) == 8)
    assert len(set(used[5:])) == 3
    assert used[0] in used[5:]
    assert pool.close(5)
