"""Child processes that are kept running: told when they are ready, started again when they die.

We play systemd's part: a child says READY over NOTIFY_SOCKET, and what it stores with FDSTORE is
handed to its successor, so the arena outlives a daemon. Children are tied to this process by the
parent-death signal (tied_start.py) and must be started by a thread that lives as long as they: the
main one. Invariants: a child that never became ready and failed is not started again; one that was
ready is, after a pause that grows while it keeps failing.
"""

from __future__ import annotations

import array
import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from protocol.errors import ConfigError, HeadraceError

MAX_FAILURES = 6  # starts in a row that never became ready
_FIRST_PAUSE_S = 0.1  # doubled with each failure
_MAX_PAUSE_S = 5.0
_MAX_DATAGRAM = 4096
_MAX_PATH_BYTES = 107
_KILL_S = 5.0


class ChildFailed(HeadraceError):
    """A child cannot be kept running. `status` is what to end with."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class Program:
    """What a child runs."""

    name: str  # as people read it
    arguments: Sequence[str]  # of our Python
    stop_s: float = 5.0  # how long it may take to end


@dataclass(slots=True)
class Child:
    """One child process and its successors."""

    program: Program
    notify: socket.socket
    notify_path: Path
    process: subprocess.Popen[bytes] | None = None
    pidfd: int = -1
    is_ready: bool = False
    was_ready: bool = False  # once at least
    told: dict[str, str] = field(default_factory=dict)  # what it notified, by name
    stored: int = -1  # the descriptor that it stored
    n_failures: int = 0
    start_at: float | None = field(default=None)  # when it is to be started again


def kill(process: subprocess.Popen[bytes], name: str) -> None:
    """Kill a child and wait for it; one in a read that does not return is left, with a line."""
    process.kill()
    try:
        process.wait(_KILL_S)
    except subprocess.TimeoutExpired:
        sys.stderr.write(
            f"headrace: {name} (pid {process.pid}) has not ended {_KILL_S:g} s after SIGKILL; "
            "it is left to the kernel\n"
        )


class Supervisor:
    """Keeps children in one runtime directory.

    environment   of the children, without NOTIFY_SOCKET
    """

    def __init__(self, runtime_dir: Path, environment: Mapping[str, str]) -> None:
        self._runtime_dir = runtime_dir
        self._environment = environment
        self.children: list[Child] = []
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ)

    def add(self, program: Program) -> Child:
        """Start a child. Raises ConfigError where its notify socket's path would be too long."""
        path = self._runtime_dir / f"serve-{os.getpid()}-{len(self.children)}"
        if len(os.fsencode(path)) > _MAX_PATH_BYTES:
            raise ConfigError(f"{path}: too long for a socket; choose a shorter --runtime-dir")
        notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        path.unlink(missing_ok=True)
        notify.bind(str(path))
        child = Child(program, notify, path)
        self.children.append(child)
        self._selector.register(notify, selectors.EVENT_READ, child)
        self._start(child)
        return child

    @property
    def all_ready(self) -> bool:
        """Whether every child has said that it is ready."""
        return all(child.is_ready for child in self.children)

    def wake(self) -> None:
        """End a wait; safe in a signal handler."""
        os.eventfd_write(self._wake, 1)

    def wait(self, timeout_s: float) -> None:
        """Wait for news of the children and see to them. Raises ChildFailed."""
        now = time.monotonic()
        starts = [child.start_at - now for child in self.children if child.start_at is not None]
        for key, _ in self._selector.select(max(0.0, min([timeout_s, *starts]))):
            if isinstance(key.fileobj, socket.socket):
                self._read(key.data)
        for child in self.children:
            if child.process is not None and child.process.poll() is not None:
                self._died(child)
            if child.start_at is not None and time.monotonic() >= child.start_at:
                self._start(child)

    def stop(self) -> None:
        """End the children, the last one first, and wait for each."""
        for child in reversed(self.children):
            _stop(child)

    def close(self) -> None:
        """Kill what still runs and give everything back, within some seconds a child."""
        for child in reversed(self.children):
            if child.process is not None and child.process.poll() is None:
                kill(child.process, child.program.name)
            self._forget_process(child)
            child.notify.close()
            child.notify_path.unlink(missing_ok=True)
            if child.stored >= 0:
                os.close(child.stored)
                child.stored = -1
        self.children.clear()
        if self._wake >= 0:
            self._selector.close()
            os.close(self._wake)
            self._wake = -1

    def _start(self, child: Child) -> None:
        child.start_at = None
        child.is_ready = False
        starter = Path(__file__).with_name("tied_start.py")
        command = [sys.executable, "-I", "-S", str(starter), str(os.getpid()), str(child.stored)]
        command += [sys.executable, *child.program.arguments]
        child.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=() if child.stored < 0 else (child.stored,),
            env={**self._environment, "NOTIFY_SOCKET": str(child.notify_path)},
            process_group=0,  # Ctrl-C in the terminal is ours to handle
        )
        child.pidfd = os.pidfd_open(child.process.pid)
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)

    def _read(self, child: Child) -> None:
        while True:
            try:
                text, ancillary, _, _ = child.notify.recvmsg(
                    _MAX_DATAGRAM, 64, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            for _, kind, data in ancillary:
                if kind == socket.SCM_RIGHTS:
                    self._store(child, data[: len(data) - len(data) % 4])
            for line in text.decode("utf-8", "replace").splitlines():
                name, _, value = line.partition("=")
                if name == "READY":
                    child.is_ready = child.was_ready = True
                    child.n_failures = 0
                child.told[name] = value

    def _store(self, child: Child, packed: bytes) -> None:
        for descriptor in array.array("i", packed):
            if child.stored >= 0:
                os.close(child.stored)
            child.stored = descriptor

    def _died(self, child: Child) -> None:
        assert child.process is not None
        self._read(child)
        status = child.process.returncode
        self._forget_process(child)
        name = child.program.name
        if not child.was_ready and status > 0:
            raise ChildFailed(f"{name} did not start", status)
        if not child.is_ready:
            child.n_failures += 1
        if child.n_failures >= MAX_FAILURES:
            text = f"{name} ended {child.n_failures} times before it was ready, last with {status}"
            raise ChildFailed(text, 1)
        pause = _FIRST_PAUSE_S * 2**child.n_failures if child.n_failures else 0.0
        child.start_at = time.monotonic() + min(pause, _MAX_PAUSE_S)
        child.is_ready = False
        words = f"signal {-status}" if status < 0 else f"status {status}"
        sys.stderr.write(f"headrace: {name} ended with {words}; it is started again\n")

    def _forget_process(self, child: Child) -> None:
        child.process = None
        if child.pidfd >= 0:
            self._selector.unregister(child.pidfd)
            os.close(child.pidfd)
            child.pidfd = -1


def _stop(child: Child) -> None:
    process = child.process
    if process is None or process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(child.program.stop_s)
