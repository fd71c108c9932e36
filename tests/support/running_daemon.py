"""A real expert daemon for tests: a child process that can be killed, or one in this process.

The child's supervisor is played by the test: it is told READY over NOTIFY_SOCKET and keeps the
arena's descriptor that comes with FDSTORE, to hand it to the next one.
"""

from __future__ import annotations

import array
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from expert_daemon.arena_plan import plan
from expert_daemon.config import DaemonConfig
from expert_daemon.daemon import Daemon
from protocol.arena.handover import start_with_descriptors
from protocol.errors import ConfigError
from protocol.files.checkpoint import Checkpoint
from tests.support.faulty_source import Faults, FaultySource

ROOT = Path(__file__).resolve().parents[2]


def smallest_arena(checkpoint: Checkpoint, top_k_batch: int) -> int:
    """Bytes of the smallest legal arena, as the refusal of a smaller one says."""
    try:
        plan(checkpoint, size_bytes=4096, max_bytes=0, top_k_batch=top_k_batch)
    except ConfigError as error:
        return int(str(error).rpartition("smallest: ")[2].split()[0])
    raise AssertionError("an arena of one page was accepted")


class DaemonProcess:
    """`python -m expert_daemon` over a model, in a runtime directory."""

    def __init__(
        self,
        model: Path | str,
        runtime_dir: Path,
        *flags: str,
        program: tuple[str, ...] = ("-m", "expert_daemon"),
    ) -> None:
        self.runtime_dir = runtime_dir
        self._command = [sys.executable, *program, "--model", str(model)]
        self._command += ["--runtime-dir", str(runtime_dir)]
        self._command += ["--state-dir", str(runtime_dir / "state"), *flags]
        self._notify_path = runtime_dir / "notify"
        self._notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notified.bind(str(self._notify_path))
        self.arena = -1  # kept for the next daemon
        self.process: subprocess.Popen[bytes] | None = None
        self.log = runtime_dir / "log"

    def start(self, *, with_arena: bool = True, timeout: float = 20.0) -> None:
        """Start and wait for READY; the arena kept from before goes with it."""
        passed = {"arena": self.arena} if self.arena >= 0 and with_arena else {}
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment |= {"NOTIFY_SOCKET": str(self._notify_path), "PYTHONPATH": path}
        with self.log.open("ab") as log:
            self.process = start_with_descriptors(
                self._command, passed, environ=environment, stdout=log, stderr=log
            )
        self._notified.settimeout(0.1)
        ends = time.monotonic() + timeout
        while True:
            has_ended = not self.is_alive  # asked first: what it said last still lies there
            try:
                text, ancillary, _, _ = self._notified.recvmsg(4096, 64, socket.MSG_CMSG_CLOEXEC)
            except TimeoutError:
                if has_ended or time.monotonic() > ends:
                    raise AssertionError(f"no READY: {self.log.read_text()}") from None
                continue
            for _, kind, data in ancillary:
                if kind == socket.SCM_RIGHTS:
                    self._keep(array.array("i", data)[0])
            if text.startswith(b"READY=1"):
                return

    def _keep(self, descriptor: int) -> None:
        if self.arena >= 0:
            os.close(self.arena)
        self.arena = descriptor

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """kill -9, and wait."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """A signal, and the exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(10)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        self._notified.close()
        self._keep(-1)


@contextlib.contextmanager
def daemon_process(
    model: Path | str, runtime_dir: Path, *flags: str, **options: Any
) -> Iterator[DaemonProcess]:
    """A started DaemonProcess, gone at the end."""
    daemon = DaemonProcess(model, runtime_dir, *flags, **options)
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.close()


class DaemonThread:
    """A daemon on a thread of this process, with a source that fails when told to."""

    def __init__(
        self, model: Path | str, runtime_dir: Path, faults: Faults | None = None, **settings: Any
    ) -> None:
        config = DaemonConfig(
            model=str(model),
            runtime_dir=runtime_dir,
            state_dir=runtime_dir / "state",
            **settings,
        )
        self.runtime_dir = runtime_dir
        self.faults = faults or Faults()
        self.source: FaultySource | None = None
        self.daemon = Daemon(config, wrap_source=self._wrap)
        self._thread = threading.Thread(target=self.daemon.run, daemon=True)
        self._thread.start()

    def _wrap(self, source: Any) -> FaultySource:
        self.source = FaultySource(source, self.faults)
        return self.source

    def close(self) -> None:
        self.faults.unstick.set()
        self.daemon.stop()
        self._thread.join(10)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def daemon_thread(
    model: Path | str, runtime_dir: Path, faults: Faults | None = None, **settings: Any
) -> Iterator[DaemonThread]:
    """A DaemonThread, stopped at the end."""
    daemon = DaemonThread(model, runtime_dir, faults, **settings)
    try:
        yield daemon
    finally:
        daemon.close()
