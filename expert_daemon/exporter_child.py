"""The exporter's process: begun and ended with the daemon, and begun again where it ends.

It is tried again for ever, so what is told of it is told when it changes. On its standard output it
says that it serves, or why it ends.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

from protocol.errors import ConfigError
from protocol.wording import to_install

from .log import log

PAUSE_S = 5.0
STOP_S = 1.0
SERVING = "serving"  # what it says when it does
_MAX_HEARD = 4096  # bytes of it


def check_exporter() -> None:
    """Raise ConfigError where the library that metrics need is missing."""
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigError(
            f"--metrics needs prometheus-client, which is not installed: {to_install('metrics')}"
        )


class ExporterChild:
    """Runs `python -m expert_daemon.exporter` while the daemon runs."""

    def __init__(self, runtime_dir: Path, address: str) -> None:
        self._command = [sys.executable, "-m", "expert_daemon.exporter", str(runtime_dir), address]
        self._process: subprocess.Popen[bytes] | None = None
        self._next_at = 0.0
        self._heard = b""  # from the process
        self._said = ""  # why there is none that serves

    def tend(self) -> None:
        """Begin it where it does not run; call now and then."""
        if self._process is not None:
            self._listen(self._process)
        if self._process is None and time.monotonic() >= self._next_at:
            self._begin()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        status = process.poll()  # asked first: what it said before it ended is heard
        assert process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            self._heard = (self._heard + os.read(process.stdout.fileno(), 4096))[-_MAX_HEARD:]
        lines = self._heard.decode(errors="replace").split("\n")
        if SERVING in lines[:-1] and self._said:
            log(f"metrics: served at {self._command[-1]} now")
            self._said = ""
        if status is None:
            return
        reason = next((line for line in reversed(lines) if line not in ("", SERVING)), "")
        process.stdout.close()
        self._process = None
        self._failed(f"the exporter ended with status {status}", reason)

    def _failed(self, what: str, reason: str) -> None:
        """Tell why there is none, where that is new."""
        self._next_at = time.monotonic() + PAUSE_S
        line = f"metrics: {what}, it is tried again{reason and ': '}{reason}"
        if line != self._said:
            log(line)
        self._said = line

    def _begin(self) -> None:
        """Begin it; what the system refuses is no reason for the daemon to end."""
        self._heard = b""
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                process_group=0,  # Ctrl-C in the terminal is the daemon's to handle
            )
        except OSError as error:
            self._failed("the exporter cannot be begun", str(error))
            return
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._process = process

    def close(self) -> None:
        """End it."""
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        if self._process.stdout is not None:
            self._process.stdout.close()
