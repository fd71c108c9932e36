"""Children that are kept running, played by programs of a few lines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from compute.commands.children import DaemonChild
from compute.commands.supervision import Child, ChildFailed, Program, Supervisor
from protocol.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
READY = "import sys, time; from protocol.sd_notify import notify; notify('READY=1\\nSTATUS=here');"
SLEEPS = READY + "time.sleep(60)"
STORES = (
    "import os, time; from protocol.sd_notify import notify;"
    "from protocol.arena.handover import listen_descriptors as passed;"
    "arena = passed().get('arena');"
    "found = 'none' if arena is None else os.pread(arena, 9, 0).decode();"
    "arena = os.memfd_create('x') if arena is None else arena;"
    "os.pwrite(arena, b'from ' + str(os.getpid()).encode()[-4:], 0);"
    "notify('FDSTORE=1\\nFDNAME=arena', [arena]);"
    "notify('READY=1\\nSTATUS=' + found); time.sleep(60)"
)


@pytest.fixture
def supervisor(runtime_dir: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(runtime_dir, {**os.environ, "PYTHONPATH": str(ROOT)})
    yield supervisor
    supervisor.close()


def _add(supervisor: Supervisor, code: str) -> Child:
    return supervisor.add(Program("the child", ["-S", "-c", code]))


def _until(supervisor: Supervisor, holds: Callable[[], Any], seconds: float = 20.0) -> None:
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends
        supervisor.wait(0.2)


def test_a_child_is_ready_when_it_says_so(supervisor: Supervisor) -> None:
    child = _add(supervisor, SLEEPS)
    assert not supervisor.all_ready
    _until(supervisor, lambda: supervisor.all_ready)
    assert child.told["STATUS"] == "here"


def test_a_child_that_died_is_started_again(
    supervisor: Supervisor, capfd: pytest.CaptureFixture[str]
) -> None:
    child = _add(supervisor, SLEEPS)
    _until(supervisor, lambda: child.is_ready)
    assert child.process is not None
    first = child.process.pid
    os.kill(first, signal.SIGKILL)
    _until(supervisor, lambda: child.is_ready and child.process and child.process.pid != first)
    assert "the child ended with signal 9; it is started again" in capfd.readouterr().err


def test_what_a_child_stored_is_handed_to_its_successor(supervisor: Supervisor) -> None:
    child = _add(supervisor, STORES)
    _until(supervisor, lambda: child.is_ready)
    assert child.told["STATUS"] == "none"
    assert child.process is not None
    first = child.process.pid
    os.kill(first, signal.SIGKILL)
    _until(supervisor, lambda: child.told["STATUS"] == "from " + str(first)[-4:])


def test_a_child_that_cannot_start_ends_it_with_its_status(supervisor: Supervisor) -> None:
    _add(supervisor, "raise SystemExit(2)")
    with pytest.raises(ChildFailed, match="the child did not start") as failed:
        _until(supervisor, lambda: False)
    assert failed.value.status == 2


def test_a_child_that_fails_again_and_again_is_given_up(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compute.commands.supervision.MAX_FAILURES", 2)
    child = _add(supervisor, SLEEPS)
    _until(supervisor, lambda: child.is_ready)
    child.program = Program("the child", ["-S", "-c", "raise SystemExit(7)"])
    assert child.process is not None
    child.process.kill()
    with pytest.raises(ChildFailed, match=r"ended 2 times before it was ready, last with 7"):
        _until(supervisor, lambda: False)


def test_children_end_in_reverse_order_and_by_force_where_they_must(
    supervisor: Supervisor,
) -> None:
    _add(supervisor, SLEEPS)
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + SLEEPS
    child = supervisor.add(Program("the stubborn one", ["-S", "-c", stubborn], stop_s=0.1))
    _until(supervisor, lambda: supervisor.all_ready)
    processes = [child.process for child in supervisor.children]
    supervisor.stop()
    supervisor.close()
    assert child.process is None
    assert [process.returncode for process in processes if process] == [
        -signal.SIGTERM,
        -signal.SIGKILL,
    ]


@pytest.mark.timeout(20)
def test_a_child_that_does_not_die_is_left_and_named(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("compute.commands.supervision._KILL_S", 0.1)
    child = _add(supervisor, SLEEPS)
    process = child.process
    assert process is not None
    with monkeypatch.context() as patched:
        patched.setattr(process, "kill", lambda: None)  # as one in an uninterruptible read
        supervisor.close()
    wanted = f"headrace: the child (pid {process.pid}) has not ended 0.1 s after SIGKILL"
    assert wanted in capfd.readouterr().err
    assert process.poll() is None
    process.kill()
    process.wait(10)


@pytest.mark.timeout(20)
def test_a_daemon_of_a_command_that_does_not_die_is_left_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("compute.commands.supervision._KILL_S", 0.1)
    monkeypatch.setattr("compute.commands.children._STOP_S", 0.1)
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    daemon = DaemonChild([], tmp_path, {})
    daemon._process = process
    with monkeypatch.context() as patched:
        for name in ("terminate", "kill", "send_signal"):
            patched.setattr(process, name, lambda *_: None)
        daemon.stop()
    wanted = f"headrace: the expert daemon (pid {process.pid}) has not ended 0.1 s after SIGKILL"
    assert wanted in capfd.readouterr().err
    process.kill()
    process.wait(10)


def test_a_wait_is_ended_from_a_signal_handler(supervisor: Supervisor) -> None:
    supervisor.wake()
    began = time.monotonic()
    supervisor.wait(30)
    assert time.monotonic() - began < 5


def test_a_directory_whose_sockets_would_be_too_long_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    supervisor = Supervisor(deep, {})
    with pytest.raises(ConfigError, match="too long for a socket"):
        _add(supervisor, SLEEPS)
    supervisor.close()
