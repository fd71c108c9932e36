from __future__ import annotations

import array
import fcntl
import mmap
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.arena.fds import (
    check_arena,
    create_arena,
    is_writable,
    peer_credentials,
    receive_descriptor,
    reopen_read_only,
    send_descriptor,
)
from protocol.arena.layout import ArenaLayout, Identity, write_identity
from protocol.errors import ConfigError, DaemonLost, ProtocolError

LAYOUT = ArenaLayout.plan(
    n_layers=2,
    n_experts=4,
    n_slots_max=3,
    slot_bytes=4096,
    row_bytes=36,
    ring_rows=16,
    piece_offsets=(0, 256, 512, 768, 1024, 1280),
    piece_bytes=(200, 8, 200, 8, 200, 8),
)
IDENTITY = Identity(LAYOUT, b"a" * 16, b"f" * 16, daemon_generation=1, n_slots=3)


@pytest.fixture
def arena() -> Iterator[int]:
    descriptor = create_arena(LAYOUT.n_bytes)
    with mmap.mmap(descriptor, LAYOUT.n_bytes) as memory:
        write_identity(memory, IDENTITY)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield left, right
    left.close()
    right.close()


def test_arena_can_neither_shrink_nor_grow_and_is_sparse(arena: int) -> None:
    for n_bytes in (4096, 2 * LAYOUT.n_bytes):
        with pytest.raises(PermissionError):
            os.ftruncate(arena, n_bytes)
    assert fcntl.fcntl(arena, fcntl.F_GET_SEALS) == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    large = create_arena(1 << 40)
    assert os.fstat(large).st_blocks == 0
    os.close(large)
    with pytest.raises(ConfigError, match="5000 bytes"):
        create_arena(5000)


def test_arena_stays_writable_for_who_maps_it_later(arena: int) -> None:
    again = os.open(f"/proc/self/fd/{arena}", os.O_RDWR | os.O_CLOEXEC)
    with mmap.mmap(again, LAYOUT.n_bytes) as memory:
        memory[-1] = 7
    os.close(again)


def test_readers_descriptor_cannot_be_mapped_writable(arena: int) -> None:
    reader = reopen_read_only(arena)
    assert is_writable(arena) and not is_writable(reader)
    assert not os.get_inheritable(reader)
    with pytest.raises(PermissionError):
        mmap.mmap(reader, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    assert check_arena(reader) == IDENTITY
    os.close(reader)


def test_descriptor_arrives_close_on_exec_with_its_payload(
    arena: int, pair: tuple[socket.socket, socket.socket]
) -> None:
    send_descriptor(pair[0], arena, b"hello")
    descriptor, payload = receive_descriptor(pair[1], timeout_s=1)
    assert payload == b"hello"
    assert descriptor is not None and descriptor != arena
    assert not os.get_inheritable(descriptor)
    assert check_arena(descriptor, n_bytes=LAYOUT.n_bytes, arena_id=b"a" * 16) == IDENTITY
    os.close(descriptor)


def test_two_descriptors_are_refused_and_closed(
    arena: int, pair: tuple[socket.socket, socket.socket]
) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for n_descriptors in (2, 5, 30):
        rights = array.array("i", [arena] * n_descriptors)
        pair[0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        with pytest.raises(ProtocolError, match="wanted one"):
            receive_descriptor(pair[1], timeout_s=1)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_silence_and_hanging_up_are_a_lost_daemon(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    with pytest.raises(DaemonLost, match=r"no answer in 0\.05 s"):
        receive_descriptor(pair[1], timeout_s=0.05)
    pair[0].close()
    with pytest.raises(DaemonLost, match="hung up"):
        receive_descriptor(pair[1], timeout_s=1)


def test_packet_without_a_descriptor_carries_its_text(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    pair[0].send(b"no such session")
    assert receive_descriptor(pair[1], timeout_s=1) == (None, b"no such session")


def test_packet_that_is_too_long_is_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].send(b"x" * 300)
    with pytest.raises(ProtocolError, match="cut short"):
        receive_descriptor(pair[1], timeout_s=1)


def _unsealed(n_bytes: int, seals: int | None) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, n_bytes)
    if seals is not None:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@pytest.mark.parametrize(
    "seals",
    [
        None,
        fcntl.F_SEAL_SHRINK,
        fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE,
        fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | 0x10,
    ],
)
def test_wrong_seals_are_refused(seals: int | None) -> None:
    descriptor = _unsealed(LAYOUT.n_bytes, seals)
    with pytest.raises(ProtocolError, match="seals"):
        check_arena(descriptor)
    os.close(descriptor)


def test_what_is_no_memory_file_is_refused() -> None:
    for path in ("/dev/null", __file__):
        descriptor = os.open(path, os.O_RDONLY)
        with pytest.raises(ProtocolError, match="seal"):
            check_arena(descriptor)
        os.close(descriptor)


def test_size_and_arena_id_must_be_those_announced(arena: int) -> None:
    with pytest.raises(ProtocolError, match=r"has \d+ bytes, announced 4096"):
        check_arena(arena, n_bytes=4096)
    with pytest.raises(ProtocolError, match="announced 6262"):
        check_arena(arena, arena_id=b"b" * 16)


def test_file_smaller_than_its_layout_is_refused(arena: int) -> None:
    for n_bytes, word in ((1024, "less than a page"), (8192, "its layout")):
        descriptor = _unsealed(n_bytes, None)
        os.pwrite(descriptor, os.pread(arena, min(n_bytes, 4096), 0), 0)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        with pytest.raises(ProtocolError, match=word):
            check_arena(descriptor)
        os.close(descriptor)


def test_page_of_zeros_is_no_arena() -> None:
    descriptor = create_arena(8192)
    with pytest.raises(ProtocolError, match="wanted an arena"):
        check_arena(descriptor)
    os.close(descriptor)


def test_peer_is_who_the_kernel_says(pair: tuple[socket.socket, socket.socket]) -> None:
    peer = peer_credentials(pair[0])
    assert (peer.pid, peer.uid, peer.gid) == (os.getpid(), os.getuid(), os.getgid())


def test_sending_to_who_is_gone_or_does_not_read_never_waits(
    arena: int, pair: tuple[socket.socket, socket.socket]
) -> None:
    def flood() -> None:
        while True:
            send_descriptor(pair[0], arena, b"x")

    with pytest.raises(BlockingIOError):
        flood()
    pair[1].close()
    with pytest.raises(OSError):
        send_descriptor(pair[0], arena, b"x")
