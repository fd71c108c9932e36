"""Frames for clients that read late, never, or are gone: order, bounds, and the others beside."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import zmq

from protocol.wire import replies as module
from protocol.wire.replies import Replies
from protocol.wire.sockets import open_dealer, open_router

if TYPE_CHECKING:
    from protocol.wire.sockets import Socket

N_FRAMES = 1000
FRAME = b"x" * 1000


class Rig:
    """A ROUTER whose pipes hold a frame or two, and DEALERs that have said hello to it."""

    def __init__(self, path: Path) -> None:
        self._context: zmq.Context[Socket] = zmq.Context()
        self._path = path
        self.router = open_router(self._context, path)
        self.replies = Replies(self.router)
        self._dealers: list[Socket] = []

    def client(self) -> tuple[Socket, bytes]:
        """A client and its route."""
        dealer = open_dealer(self._context, self._path)
        self._dealers.append(dealer)
        dealer.send(b"hello")
        assert self.router.poll(5000)
        route, _ = self.router.recv_multipart()
        return dealer, route

    def close(self) -> None:
        for socket in (self.router, *self._dealers):
            socket.close(linger=0)
        self._context.term()

    def fill(self, route: bytes, n_frames: int = N_FRAMES) -> list[bytes]:
        """Send until well beyond what the pipe and the kernel take."""
        frames = [b"%06d" % number + FRAME for number in range(n_frames)]
        assert all(self.replies.send(route, frame) for frame in frames)
        assert self.replies.any_wait
        return frames


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr("protocol.wire.sockets.SEND_HIGH_WATER", 2)
    monkeypatch.setattr("protocol.wire.sockets.RECEIVE_HIGH_WATER", 2)
    monkeypatch.setattr(module, "MOST_WAITING_BYTES", N_FRAMES * 1500)
    rig = Rig(tmp_path / "sock")
    yield rig
    rig.close()


def test_who_reads_late_gets_every_frame_in_order(rig: Rig) -> None:
    dealer, route = rig.client()
    frames = rig.fill(route)
    heard: list[bytes] = []
    ends = time.monotonic() + 30
    while len(heard) < len(frames):
        assert time.monotonic() < ends
        if rig.replies.any_wait:
            assert rig.replies.flush() == []
        while dealer.poll(0):
            heard.append(dealer.recv())
    assert heard == frames
    assert not rig.replies.any_wait


def test_beside_one_that_does_not_read_the_others_are_sent_to_at_once(rig: Rig) -> None:
    _, deaf = rig.client()
    rig.fill(deaf)
    dealer, route = rig.client()
    assert rig.replies.send(route, b"at once")
    assert dealer.poll(5000)
    assert dealer.recv() == b"at once"


def test_who_has_too_much_waiting_is_given_up_and_may_begin_anew(rig: Rig) -> None:
    _, route = rig.client()
    n_sent = 0
    while n_sent < 10 * N_FRAMES and rig.replies.send(route, FRAME):
        n_sent += 1
    assert N_FRAMES < n_sent < 10 * N_FRAMES - 1
    assert not rig.replies.any_wait
    assert rig.replies.send(route, FRAME)


def test_who_takes_nothing_for_long_is_given_up_and_a_pause_of_ours_is_not_its_silence(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence_ms = 60_000  # longer than the next lines take anywhere
    monkeypatch.setattr(module, "DEAF_MS", silence_ms)
    _, route = rig.client()
    rig.fill(route)
    began = time.monotonic()
    for _ in range(1000):  # until the kernel has taken what it takes
        time.sleep(0.0002)
        rig.replies.flush()
    now = time.monotonic()
    deaf_ms = 1000 * (now - began)  # already, at most
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    began = now = now + 3600.0
    assert rig.replies.flush() == []
    while not (lost := rig.replies.flush()):
        now += 0.1
    assert lost == [route]
    assert silence_ms - deaf_ms - 200 < 1000 * (now - began) < silence_ms + 200
    assert not rig.replies.any_wait


def test_who_is_gone_is_told_of_by_send_and_by_flush(rig: Rig) -> None:
    dealer, route = rig.client()
    rig.fill(route)
    dealer.close(linger=0)
    ends = time.monotonic() + 5
    lost: list[bytes] = []
    while not lost:
        assert time.monotonic() < ends
        lost = rig.replies.flush()
        time.sleep(0.001)
    assert lost == [route]
    assert not rig.replies.send(route, b"anybody?")


def test_a_refusal_to_a_stranger_does_not_wait(rig: Rig) -> None:
    _, route = rig.client()
    taken = [rig.replies.send(route, FRAME, keep=False) for _ in range(N_FRAMES)]
    assert not all(taken)
    assert not rig.replies.any_wait
