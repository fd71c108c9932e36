from __future__ import annotations

import threading
import time

from expert_daemon.reader_threads import Lane, ReaderThreads


def wait_for(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def wait(event):
    event.wait(10)


def n_threads(pool):
    return len(pool._workers)


def test_threads_that_hang_are_replaced_and_the_surplus_ends():
    pool = ReaderThreads(2, 4096)
    stuck, done = threading.Event(), []
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
