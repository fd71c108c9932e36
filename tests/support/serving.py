"""`headrace serve` as a process: started, asked, hurt and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.running_frontend import Reply, ask, eventually

ROOT = Path(__file__).resolve().parents[2]
MODULES = {"daemon": "expert_daemon", "compute": "compute", "frontend": "compute.frontend"}


class Serving:
    """The command over a model, its three children below it."""

    def __init__(
        self, runtime_dir: Path, *flags: str, model: Path | str = "demo", name: str = "serve"
    ) -> None:
        self.runtime_dir = runtime_dir
        self.log = runtime_dir / f"{name}.log"
        self._out = runtime_dir / f"{name}.out"
        command = [sys.executable, str(ROOT / "headrace.py"), "serve", "--model", str(model)]
        command += ["--runtime-dir", str(runtime_dir), "--state-dir", str(runtime_dir / "state")]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
        with self._out.open("wb") as out, self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--port", "0", *flags], stdout=out, stderr=log, env=environment
            )

    def ready(self, seconds: float = 60.0) -> None:
        """Wait until it has said where it is."""
        eventually(lambda: self._out.read_text() or self.process.poll() is not None, seconds)
        assert self.process.poll() is None, self.log.read_text()

    @property
    def url(self) -> str:
        return self._out.read_text().removeprefix("ready: ").strip()

    def ask(self, path: str, body: Any = None, **more: Any) -> Reply:
        return ask(self.url, path, body, **more)

    def pid_of(self, part: str) -> int:
        """The process that is one of MODULES now; 0 where it does not run."""
        for pid in _children(self.process.pid):
            with contextlib.suppress(OSError):
                words = Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")
                if words[1:3] == [b"-m", MODULES[part].encode()]:
                    return pid
        return 0

    def kill(self, part: str) -> None:
        """kill -9 of a child."""
        pid = self.pid_of(part)
        assert pid
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: self.pid_of(part) != pid)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """A signal, and the exit status."""
        self.process.send_signal(number)
        return self.process.wait(30)

    def close(self) -> None:
        if self.process.poll() is None:
            try:
                self.stop()
            finally:
                self.process.kill()
                self.process.wait(10)


def _children(pid: int) -> list[int]:
    text = Path("/proc", str(pid), "task", str(pid), "children").read_text()
    return [int(word) for word in text.split()]


@contextlib.contextmanager
def serving(runtime_dir: Path, *flags: str, **more: Any) -> Iterator[Serving]:
    """A Serving that is ready, ended at the end."""
    served = Serving(runtime_dir, *flags, **more)
    try:
        served.ready()
        yield served
    finally:
        served.close()
