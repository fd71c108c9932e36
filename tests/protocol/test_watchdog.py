from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.watchdog import Watchdog


class Manager:
    """The socket of a manager that waits for signs of life."""

    def __init__(self, path: Path) -> None:
        self.environ = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "40000"}
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.socket.bind(str(path))

    def signs(self) -> int:
        n_signs = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                assert self.socket.recv(64) == b"WATCHDOG=1"
                n_signs += 1
        return n_signs


@pytest.fixture
def manager(runtime_dir: Path) -> Iterator[Manager]:
    made = Manager(runtime_dir / "notify")
    yield made
    made.socket.close()


def test_a_beat_is_a_sign_of_life(manager: Manager):
    watchdog = Watchdog("loop", environ=manager.environ)
    assert watchdog.is_watched
    watchdog.beat("loop")
    assert manager.signs() == 1


def test_many_beats_are_a_few_signs_an_interval(manager: Manager):
    watchdog = Watchdog("loop", environ=manager.environ)
    for _ in range(1000):
        watchdog.beat("loop")
    assert manager.signs() <= 5
    time.sleep(0.011)
    watchdog.beat("loop")
    assert manager.signs() == 1


def test_one_loop_that_hangs_ends_the_signs(manager: Manager):
    watchdog = Watchdog("requests", "sockets", environ=manager.environ)
    watchdog.beat("sockets")
    assert manager.signs() == 0
    watchdog.beat("requests")
    assert manager.signs() == 1
    time.sleep(0.011)
    for _ in range(3):
        watchdog.beat("sockets")
    assert manager.signs() == 0


@pytest.mark.parametrize(
    "watched",
    [
        {},
        {"WATCHDOG_USEC": ""},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "soon"},
        {"WATCHDOG_USEC": "18446744073709551615"},
        {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"},
    ],
)
def test_nobody_is_told_where_nobody_watches(manager: Manager, watched: dict[str, str]):
    watchdog = Watchdog(
        "loop", environ={"NOTIFY_SOCKET": manager.environ["NOTIFY_SOCKET"]} | watched
    )
    watchdog.beat("loop")
    assert not watchdog.is_watched
    assert manager.signs() == 0


def test_the_pid_named_may_be_ours(manager: Manager):
    environ = manager.environ | {"WATCHDOG_PID": str(os.getpid())}
    assert Watchdog("loop", environ=environ).is_watched
