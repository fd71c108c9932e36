from __future__ import annotations

import array
import os
import socket
from pathlib import Path

from protocol.sd_notify import notify


def test_state_reaches_the_socket_that_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(path)
        supervisor.settimeout(5)
        assert notify("READY=1\nSTATUS=serving", environ={"NOTIFY_SOCKET": path})
        assert supervisor.recv(100) == b"READY=1\nSTATUS=serving"


def test_descriptor_goes_to_the_store(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor,
        Path(__file__).open() as file,
    ):
        supervisor.bind(path)
        supervisor.settimeout(5)
        state = "FDSTORE=1\nFDNAME=arena"
        assert notify(state, [file.fileno()], {"NOTIFY_SOCKET": path})
        data, ancillary, _, _ = supervisor.recvmsg(100, socket.CMSG_SPACE(4))
        assert data == state.encode()
        received = array.array("i", ancillary[0][2])[0]
        assert os.path.samestat(os.fstat(received), os.fstat(file.fileno()))
        os.close(received)


def test_abstract_socket_is_reached() -> None:
    name = f"headrace-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind("\0" + name)
        supervisor.settimeout(5)
        assert notify("STOPPING=1", environ={"NOTIFY_SOCKET": "@" + name})
        assert supervisor.recv(100) == b"STOPPING=1"


def test_nobody_to_tell_is_no_error(tmp_path: Path) -> None:
    assert not notify("READY=1", environ={})
    assert not notify("READY=1", environ={"NOTIFY_SOCKET": str(tmp_path / "none")})
