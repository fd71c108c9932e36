from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from expert_daemon import descriptor_server
from expert_daemon.descriptor_server import MAX_HALF_OPEN, DescriptorServer, Grant
from expert_daemon.log import ClientLog
from protocol.arena.attach import AttachRequest
from protocol.arena.fds import PeerCredentials, create_arena

pytestmark = pytest.mark.timeout(30)


class Rig:
    """A server on a loop that the test runs; every session is granted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.gone: list[int] = []
        self.loop = asyncio.new_event_loop()
        self.arena = create_arena(4096)
        self.server = DescriptorServer(
            path,
            self.arena,
            loop=self.loop,
            allowed_uids=frozenset({os.geteuid()}),
            attach=_grant,
            gone=self.gone.append,
            clients=ClientLog(),
        )
        self.clients: list[socket.socket] = []

    def connect(self, session: int = 0) -> socket.socket:
        """A client's connection, which asks to be attached where a session is given."""
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        client.connect(str(self.path))
        self.clients.append(client)
        if session:
            client.send(AttachRequest(session, 1).pack())
        return client

    def run_until(self, condition: Callable[[], bool]) -> None:
        ends = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < ends
            self.turn()

    def turn(self) -> None:
        """Once around the loop, and whatever is ready."""
        self.loop.run_until_complete(asyncio.sleep(0.01))

    def close(self) -> None:
        self.server.close()
        self.loop.close()
        os.close(self.arena)
        for client in self.clients:
            client.close()


def _grant(request: AttachRequest, _peer: PeerCredentials) -> Grant:
    return Grant(request.session, engine=False)


def is_hung_up(client: socket.socket) -> bool:
    try:
        return client.recv(100) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def is_attached(client: socket.socket) -> bool:
    try:
        return client.recv(100) == b"arena"
    except (BlockingIOError, ConnectionError):
        return False


@pytest.fixture
def rig(runtime_dir: Path) -> Iterator[Rig]:
    with contextlib.closing(Rig(runtime_dir / "arena.sock")) as made:
        yield made


def test_a_process_that_attaches_none_loses_its_oldest_connections(rig: Rig) -> None:
    idle = [rig.connect() for _ in range(MAX_HALF_OPEN)]
    rig.turn()
    later = [rig.connect() for _ in range(3)]
    rig.run_until(lambda: all(map(is_hung_up, idle[:3])))
    assert not any(map(is_hung_up, [*idle[3:], *later]))


def test_one_that_has_asked_is_attached_before_it_would_be_dropped(rig: Rig) -> None:
    asked = [rig.connect(session) for session in range(1, 3 * MAX_HALF_OPEN + 1)]
    waiting = list(asked)

    def all_are_attached() -> bool:
        waiting[:] = [client for client in waiting if not is_attached(client)]
        return not waiting

    rig.run_until(all_are_attached)
    assert rig.gone == []
    asked[0].close()
    rig.run_until(lambda: rig.gone == [1])


def test_connections_take_at_most_a_quarter_of_the_descriptors(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptor_server, "descriptor_limit", lambda: 32)
    with contextlib.closing(Rig(runtime_dir / "arena.sock")) as rig:
        attached = [rig.connect(session) for session in range(1, 9)]
        rig.run_until(lambda: is_attached(attached[-1]))
        ninth = rig.connect(9)
        rig.run_until(lambda: is_hung_up(ninth))


def test_a_flood_of_connections_leaves_the_loop_its_turns(rig: Rig) -> None:
    clients = [rig.connect() for _ in range(descriptor_server.MAX_ACCEPTS_AT_ONCE + 1)]
    rig.server._accept()
    accepted = MAX_HALF_OPEN  # of one process, the others were hung up on
    assert sum(map(is_hung_up, clients)) == descriptor_server.MAX_ACCEPTS_AT_ONCE - accepted
