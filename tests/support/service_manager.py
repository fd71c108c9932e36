"""A service manager as far as a service can tell: notifications, descriptor store, watchdog.

Plays what systemd does for `Type=notify` with FileDescriptorStoreMax, WatchdogSec and
Restart=on-failure. Each datagram is kept, so a test can read the whole conversation.
"""

from __future__ import annotations

import array
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from protocol.arena.handover import start_with_descriptors

ROOT = Path(__file__).resolve().parents[2]


class ServiceManager:
    """Runs one service at a time below `directory`.

    command      arguments of our Python
    watchdog_s   how long it may be silent once it is ready; 0: it is not watched
    store_max    descriptors that are kept; more are closed at once
    """

    def __init__(
        self, command: list[str], directory: Path, *, watchdog_s: float = 0.0, store_max: int = 2
    ) -> None:
        self._command = [sys.executable, *command]
        self._path = directory / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self._path))
        self._watchdog_s = watchdog_s
        self._store_max = store_max
        self.log = directory / "service.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.store: list[tuple[str, int]] = []  # (name, descriptor)
        self.said: list[dict[str, str]] = []  # every datagram since the last start
        self.is_ready = False
        self.signed_at = 0.0  # monotonic, of the last sign of life
        self.n_watchdog_kills = 0

    def start(self, seconds: float = 30.0) -> None:
        """Start the service with what is stored for it, and wait until it is ready."""
        self.said.clear()
        self.is_ready = False
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
        environment |= {"NOTIFY_SOCKET": str(self._path), "PYTHONPATH": str(ROOT)}
        if self._watchdog_s:
            environment["WATCHDOG_USEC"] = str(round(1e6 * self._watchdog_s))
        with self.log.open("ab") as log:
            self.process = start_with_descriptors(
                self._command, dict(self.store), environ=environment, stdout=log, stderr=log
            )
        self.until(lambda: self.is_ready, seconds)

    def until(self, holds: Callable[[], bool], seconds: float) -> None:
        """Listen until something holds; the service may not end before."""
        ends = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < ends, self.log.read_text()
            assert self.is_alive, self.log.read_text()
            self.listen(0.05)

    def listen(self, seconds: float) -> None:
        """Take what comes for so long; kill a service that is watched and silent."""
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0:
            self._socket.settimeout(left)
            with contextlib.suppress(TimeoutError):
                text, ancillary, _, _ = self._socket.recvmsg(4096, 64, socket.MSG_CMSG_CLOEXEC)
                self._take(text.decode(), ancillary)
            self._watch()

    def _take(self, text: str, ancillary: list[tuple[int, int, bytes]]) -> None:
        lines = dict(line.split("=", 1) for line in text.splitlines())
        self.said.append(lines)
        passed = array.array("i")
        for _, kind, data in ancillary:
            if kind == socket.SCM_RIGHTS:
                passed.frombytes(data)
        name = lines.get("FDNAME", "stored")
        if lines.get("FDSTOREREMOVE") == "1":
            for kept in [kept for kept in self.store if kept[0] == name]:
                os.close(kept[1])
                self.store.remove(kept)
        for descriptor in passed:
            if lines.get("FDSTORE") == "1" and len(self.store) < self._store_max:
                self.store.append((name, descriptor))
            else:
                os.close(descriptor)
        if "READY" in lines or "WATCHDOG" in lines:
            self.signed_at = time.monotonic()
        self.is_ready = self.is_ready or lines.get("READY") == "1"

    def _watch(self) -> None:
        silent_s = time.monotonic() - self.signed_at
        if self._watchdog_s and self.is_ready and self.is_alive and silent_s > self._watchdog_s:
            self.n_watchdog_kills += 1
            self.kill()

    def count(self, name: str, value: str = "1") -> int:
        """How many datagrams since the last start hold a line."""
        return sum(lines.get(name) == value for lines in self.said)

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(15)

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)
        self.is_ready = False

    def close(self) -> None:
        if self.is_alive:
            self.kill()
        self._socket.close()
        for _, descriptor in self.store:
            os.close(descriptor)


@contextlib.contextmanager
def service_manager(
    command: list[str], directory: Path, *, watchdog_s: float = 0.0
) -> Iterator[ServiceManager]:
    """A ServiceManager, everything gone at the end; the service is not started yet."""
    manager = ServiceManager(command, directory, watchdog_s=watchdog_s)
    try:
        yield manager
    finally:
        manager.close()
