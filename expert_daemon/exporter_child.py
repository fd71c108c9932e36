"""The exporter's process: begun and ended with the daemon, and begun again where it ends."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
import time
from pathlib import Path

from protocol.errors import ConfigError
from protocol.wording import to_install

from .log import log

PAUSE_S = 5.0
STOP_S = 1.0


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
        self._said = ""  # why it could not be begun

    def tend(self) -> None:
        """Begin it where it does not run; call now and then."""
        if self._process is not None and self._process.poll() is not None:
            log(f"metrics: the exporter ended with status {self._process.returncode}")
            self._process = None
            self._next_at = time.monotonic() + PAUSE_S
        if self._process is None and time.monotonic() >= self._next_at:
            self._begin()

    def _begin(self) -> None:
        """Begin it; what the system refuses is no reason for the daemon to end."""
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C in the terminal is the daemon's to handle
            )
        except OSError as error:
            self._next_at = time.monotonic() + PAUSE_S
            line = f"metrics: the exporter cannot be begun, it is tried again: {error}"
            if line != self._said:
                log(line)
            self._said = line
        else:
            self._said = ""

    def close(self) -> None:
        """End it."""
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
