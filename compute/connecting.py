"""The engine's connection to the expert daemon, waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from protocol.errors import DaemonBusy, DaemonLost
from protocol.files.checkpoint import Checkpoint
from protocol.wire.client import ExpertClient

_HELLO_MS = 250  # short, so that a child that died is soon seen
_RETRY_S = 0.01


def connect_engine(
    runtime_dir: Path,
    checkpoint: Checkpoint,
    wait_s: float,
    tend: Callable[[], None] = lambda: None,
) -> ExpertClient:
    """Connect as the engine; wait while the daemon starts or another engine holds it.

    tend   called between tries: whoever started the daemon looks after it there

    Raises DaemonLost or DaemonBusy after `wait_s`, ProtocolError at once.
    """
    deadline = time.monotonic() + wait_s
    while True:
        tend()
        try:
            return ExpertClient(
                runtime_dir,
                role="engine",
                fingerprint=checkpoint.fingerprint,
                top_k_batch=checkpoint.config.top_k,
                hello_ms=_HELLO_MS,
            )
        except (DaemonLost, DaemonBusy):
            if time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_S)
